"""A rule file of the user's own: what of it cannot be meant is refused, and says why."""

import pytest
import yaml
from memd_alerts.rules import RulesError
from typer.testing import CliRunner

from memd.alert_rules import matcher_fault, read_rules
from memd.cli import app

RULE = {
    "name": "MemdMine",
    "group": "mine",
    "severity": "ticket",
    "summary": "it is {value}",
    "expression": {"value": {"metric": "memd_pool_capacity_pages"}},
    "above": 1,
}


@pytest.fixture
def write(tmp_path):
    def write(records=(), **changes):
        path = tmp_path / "rules.yml"
        rule = {**RULE, **changes}
        path.write_text(yaml.safe_dump({"records": list(records), "rules": [rule]}))
        return path

    return write


def selected(form, metric, **more):
    return {"expression": {form: {"metric": metric, **more}}}


def test_the_rules_of_memd_name_only_what_there_is():
    assert len(read_rules(None).rules) > 20


def test_a_rule_of_the_users_own_is_taken(write):
    assert read_rules(write(by=["gpu"], summary="{gpu}: {value}")).rule("MemdMine")
    of_the_process = selected("value", "process_open_fds")
    assert read_rules(write(**of_the_process)).rule("MemdMine")
    seconds = selected("quantile", "memd_request_duration_seconds", q=0.9, over="5m")
    assert read_rules(write(by=["model"], **seconds)).rule("MemdMine")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (selected("value", "memd_pool_pagse"), "no metric memd_pool_pagse"),
        (
            selected("rate", "memd_requests", over="5m"),
            "no metric memd_requests; there is memd_requests_total",
        ),
        (selected("rate", "memd_pool_pages", over="5m"), "memd_pool_pages is a gauge"),
        (
            selected("quantile", "memd_pool_pages", q=0.5, over="5m"),
            "no histogram memd_pool_pages",
        ),
        (
            selected("value", "memd_pool_pages", where={"stat": ["free"]}),
            "memd_pool_pages has no label stat, but gpu, state",
        ),
        (
            selected("value", "memd_pool_pages", where={"state": ["full"]}),
            "state is never full, but active",
        ),
        ({"by": ["model"]}, "by model: memd_pool_capacity_pages has no such label, but gpu"),
        ({"by": ["gpu"], **selected("value", "process_open_fds")}, "by gpu: process_open_fds"),
        (
            {"while": [{**selected("value", "memd_nothing"), "above": 0}]},
            "no metric memd_nothing",
        ),
        ({"above": {"of": {"value": {"metric": "memd_nothing"}}}}, "no metric memd_nothing"),
        ({"summary": "{value:.1f}"}, "more than the name of a label"),
        ({"summary": "{value"}, "expected '}'"),
        ({"summary": "{}"}, "more than the name of a label"),
        ({"summary": "{{ value }}"}, "double braces"),
    ],
)
def test_what_would_never_fire_is_refused(write, changes, message):
    path = write(**changes)
    with pytest.raises(RulesError) as caught:
        read_rules(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_record_is_checked_with_its_own_name(write):
    record = {"name": "gpu:mine", "by": ["gpu"], **selected("value", "memd_nothing")}
    with pytest.raises(RulesError, match="gpu:mine: there is no metric memd_nothing"):
        read_rules(write([record]))
    record = {"name": "gpu:mine", "by": ["gpu"], **selected("value", "memd_pool_pages")}
    by_model = {"by": ["model"], "expression": {"record": {"name": "gpu:mine"}}}
    with pytest.raises(RulesError, match="by model: gpu:mine has no such label, but gpu"):
        read_rules(write([record], **by_model))


def test_render_refuses_it_too(write):
    answer = CliRunner().invoke(app, ["alerts", "render", "--rules", str(write(by=["model"]))])
    assert answer.exit_code == 1
    assert "by model" in answer.output


@pytest.mark.parametrize(
    ("matchers", "message"),
    [
        ({"alertname": "MemdPoolPressure"}, None),
        ({"alertname": "MemdPool*", "gpu": "0", "severity": "*"}, None),
        ({"instance": "a:1"}, None),
        ({"foo": "bar"}, "no alert has a label 'foo'; there are alertname"),
        ({"alertname": "MemdPoolPresure"}, "no rule is named 'MemdPoolPresure'"),
        ({"alertname": "Pool*"}, "no rule is named 'Pool*'"),
        (
            {"severity": "critical"},
            "severity is never 'critical' of these alerts, but page, ticket",
        ),
    ],
)
def test_a_silence_that_could_never_match_says_why(matchers, message):
    fault = matcher_fault(read_rules(None), matchers)
    assert (fault is None) == (message is None)
    assert message is None or message in fault
