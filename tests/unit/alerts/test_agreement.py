"""memd's own evaluation says what Prometheus says: the same cases, through both."""

from pathlib import Path

import pytest
import yaml
from memd_alerts.evaluate import evaluate
from memd_alerts.history import History
from memd_alerts.rules import shipped_rules
from memd_alerts.state import State
from memd_alerts.values import Values
from scrapes import Sample, parse_series, parse_values

CASES = Path(__file__).parents[3] / "deploy" / "prometheus" / "memd.rules.test.yml"
CASES = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
RULES = shipped_rules()
EVERY_SECONDS = 15
START = 0.0  # Prometheus's tests begin at the epoch


def seconds(text: str) -> int:
    units, total, number = {"s": 1, "m": 60, "h": 3600}, 0, ""
    for sign in text:
        if sign in units:
            total, number = total + int(number) * units[sign], ""
        else:
            number += sign
    return total


def instances(case):
    found = {parse_series(each["series"])[1]["instance"] for each in case["input_series"]}
    return sorted(found)


def run(case, instance):
    """Firing alerts and record values of one daemon, by second."""
    series = []
    for each in case["input_series"]:
        name, labels = parse_series(each["series"])
        if labels.pop("instance") == instance:
            del labels["job"]
            series.append((name, labels, parse_values(each["values"])))
    history, state, told, recorded = History(RULES), State(), {}, {}
    last = max(seconds(each["eval_time"]) for each in case["alert_rule_test"])
    for index in range(last // EVERY_SECONDS + 1):
        now = START + index * EVERY_SECONDS
        samples = [
            Sample(name, labels, values[index])
            for name, labels, values in series
            if index < len(values) and values[index] is not None
        ]
        history.add(now, samples)
        state, _ = evaluate(RULES, history, state, now, {"instance": instance})
        told[now] = [alert for alert in state.alerts if alert.state == "firing"]
        values = Values(RULES, history, now)
        recorded[now] = {record.name: values.recorded(record) for record in RULES.records}
    return told, recorded


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"][:50])
def test_a_case_of_prometheus_holds_here(case):
    assert case["interval"] == f"{EVERY_SECONDS}s"
    runs = {instance: run(case, instance) for instance in instances(case)}
    compared = 0
    for check in case["alert_rule_test"]:
        if RULES.rule(check["alertname"]).prometheus_only:
            continue
        now = START + seconds(check["eval_time"])
        firing = [
            alert
            for told, _ in runs.values()
            for alert in told[now]
            if alert.rule == check["alertname"]
        ]
        labels = [
            {"alertname": check["alertname"], **each["exp_labels"]} for each in check["exp_alerts"]
        ]
        assert [alert.labels for alert in firing] == labels, check
        compared += 1
    for check in case.get("promql_expr_test", ()):
        (instance,) = runs
        found = runs[instance][1][seconds(check["eval_time"])][check["expr"]]
        expected = [each["value"] for each in check["exp_samples"]]
        assert list(found.values()) == pytest.approx(expected)
    everything = {each["alertname"] for each in case["alert_rule_test"]}
    assert compared or everything <= {r.name for r in RULES.rules if r.prometheus_only}
