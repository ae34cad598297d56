"""The routes under /alerts and /jobs, and the commands that use them."""

import asyncio
import contextlib
import json
import time

import pytest
import yaml
from http_stand import Stand
from memd_alerts.trial import KeptSample
from typer.testing import CliRunner
from webhook import webhook

from memd.alert_trial import RuleSamples
from memd.chores import build_alerting, build_jobs, instance_of
from memd.cli import app
from memd.config import build
from memd.jobs import Jobs


def run_cli(stand, *arguments):
    return CliRunner().invoke(app, [*arguments, "--url", stand.url])


def on_loop(stand, work):
    """Run a coroutine where the daemon would."""
    return asyncio.run_coroutine_threadsafe(work, stand.loop).result(30)


@pytest.fixture
def stand(tmp_path):
    """A stand with alerts and jobs, none of which runs by itself, and a channel."""
    with contextlib.ExitStack() as stack:
        hook = stack.enter_context(webhook())
        channels = tmp_path / "channels.yml"
        channels.write_text(yaml.safe_dump({"team": hook.channel}))
        channels.chmod(0o600)
        settings = build({"alerts.channels": channels, "state_dir": tmp_path / "state"})
        stand = stack.enter_context(Stand(tmp_path, settings, None, 200, 64, True))
        service = stand.service
        parts = (settings, stand.client, service.metrics, service.store)
        alerting = build_alerting(settings, [stand.url], service.metrics, service.store)
        alerting.start()
        stand.on_loop(lambda: setattr(service, "alerting", alerting))
        jobs = Jobs(build_jobs(*parts, alerting), service.store)
        stand.on_loop(lambda: setattr(service, "jobs", jobs))
        service.metrics.alerts, service.metrics.jobs = alerting, jobs
        stand.hook, stand.alerting = hook, alerting
        yield stand


def get(stand, path, status=200):
    answer = stand.http.get(f"/admin/v1/{path}")
    assert answer.status_code == status, answer.text
    return answer.json()


def evaluate(stand):
    return stand.http.post("/admin/v1/jobs/alert_evaluation/run").json()


def reload(stand, value):
    """Read the environment again, with this in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMD_MEMORY_WATERMARK_HIGH", value)
        return stand.http.post("/admin/v1/settings/reload", json={"reason": "test"})


def fire(stand):
    """A reload of the settings fails: an alert without a long wait."""
    assert reload(stand, "much").status_code == 400
    evaluate(stand)
    (alert,) = get(stand, "alerts")["alerts"]
    assert (alert["name"], alert["state"]) == ("MemdConfigReloadFailed", "pending")
    clock, stand.alerting._clock = stand.alerting._clock, lambda: clock() + 61
    evaluate(stand)
    return get(stand, "alerts")["alerts"][0]


def test_an_alert_is_told_in_full(stand):
    assert get(stand, "alerts") == {"alerts": [], "evaluated_at": None}
    alert = fire(stand)
    assert alert["state"] == "firing"
    assert alert["labels"] == {
        "alertname": "MemdConfigReloadFailed",
        "severity": "ticket",
        "instance": stand.url.removeprefix("http://"),
    }
    assert (alert["value"], alert["threshold"], alert["silenced"]) == (0, 1, False)
    assert alert["fired_at"] >= alert["since"] + 60
    assert alert["runbook_url"] == "docs/runbooks/MemdConfigReloadFailed.md"
    metrics = stand.http.get("/metrics").text
    assert 'memd_alerts_firing{severity="ticket"} 1.0' in metrics
    table = run_cli(stand, "alerts", "list")
    assert table.exit_code == 0
    assert "MemdConfigReloadFailed" in table.output
    assert "docs/runbooks/MemdConfigReloadFailed.md" in table.output
    assert json.loads(run_cli(stand, "alerts", "list", "--format", "json").output)["alerts"]


def test_rules_show_what_they_see(stand):
    assert run_cli(stand, "alerts", "list").output == "the rules have not been evaluated yet\n"
    evaluate(stand)
    rules = {rule["name"]: rule for rule in get(stand, "alerts/rules")["rules"]}
    pressure = rules["MemdPoolPressure"]
    assert pressure["state"] == "ok"
    assert pressure["values"][0]["threshold"] == 0.9
    assert pressure["values"][0]["labels"] == {"gpu": "0"}
    assert pressure["values"][0]["met"] is False
    assert rules["MemdDown"]["evaluated_by"] == ["prometheus"]
    assert rules["MemdGpuXid"]["state"] == "unknown"  # there is no GPU here
    assert rules["MemdPoolThrashing"]["state"] == "unknown"  # one sample tells no rate
    table = run_cli(stand, "alerts", "rules").output
    assert "above 90%" in table
    assert "by Prometheus" in table
    assert "no alerts, as of" in run_cli(stand, "alerts", "list").output


def test_incidents_are_kept_with_their_length_and_peak(stand):
    fired = fire(stand)
    assert reload(stand, "90%").status_code == 200
    evaluate(stand)

    def kept():
        found = get(stand, "alerts/incidents")["incidents"]
        return found if found and found[0]["state"] == "resolved" else None

    assert stand.wait_for(kept)
    (incident,) = kept()
    assert incident["id"] == fired["id"]
    assert incident["peak"] == 0
    assert incident["unit"] == "number"
    assert incident["duration_seconds"] >= 0
    assert incident["since"] == pytest.approx(fired["since"])
    assert get(stand, f"alerts/incidents?since={incident['since'] + 1}")["incidents"] == []
    assert "resolved" in run_cli(stand, "alerts", "history").output
    get(stand, "alerts/incidents?since=nan", 400)
    get(stand, "alerts/incidents?limit=0", 400)


def test_a_silence_from_the_command_line_to_its_end(stand):
    done = run_cli(
        stand,
        "alerts",
        "silence",
        "MemdConfig*",
        "severity=ticket",
        "--for",
        "2h",
        "--reason",
        "new",
    )
    assert done.exit_code == 0, done.output
    (silence,) = get(stand, "alerts/silences")["silences"]
    assert silence["matchers"] == {"alertname": "MemdConfig*", "severity": "ticket"}
    assert silence["ends_at"] - silence["starts_at"] == pytest.approx(7200)
    alert = fire(stand)
    assert alert["silenced"]
    assert alert["silence_id"] == silence["id"]
    assert get(stand, "alerts/silences")["silences"][0]["covers"] == 1
    assert stand.hook.bodies == []
    assert silence["id"] in run_cli(stand, "alerts", "silences").output
    assert "(silenced)" in run_cli(stand, "alerts", "list").output
    assert run_cli(stand, "alerts", "unsilence", silence["id"]).exit_code == 0
    assert run_cli(stand, "alerts", "unsilence", silence["id"]).exit_code == 4
    evaluate(stand)
    assert stand.wait_for(lambda: stand.hook.bodies)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"matchers": {}}, "matchers"),
        ({"matchers": {"alertname": "MemdNobody"}}, "matchers"),
        ({"matchers": {"alertname": 7}}, "matchers.alertname"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": 1e9}, "seconds"),
        ({"reason": ""}, "reason"),
        ({"reason": None}, "reason"),
    ],
)
def test_a_wrong_silence_is_refused_by_its_field(stand, change, param):
    body = {"matchers": {"alertname": "Memd*"}, "seconds": 60, "reason": "why", **change}
    answer = stand.http.post("/admin/v1/alerts/silences", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert get(stand, "alerts/silences")["silences"] == []


def test_channels_are_shown_without_their_urls_and_can_be_tested(stand):
    (channel,) = get(stand, "alerts/channels")["channels"]
    assert (channel["name"], channel["kind"], channel["last_sent_at"]) == ("team", "json", None)
    done = run_cli(stand, "alerts", "test", "team")
    assert (done.exit_code, done.output) == (0, "team: delivered\n")
    stand.hook.failures = 1
    done = run_cli(stand, "alerts", "test", "team")
    assert (done.exit_code, done.output) == (1, "team: not delivered: json: not delivered\n")
    assert run_cli(stand, "alerts", "test", "nobody").exit_code == 4
    (channel,) = get(stand, "alerts/channels")["channels"]
    assert (channel["sent"], channel["failed"]) == (1, 1)
    for path in ("alerts/channels", "alerts", "settings"):
        assert stand.hook.channel not in stand.http.get(f"/admin/v1/{path}").text
    assert "team" in run_cli(stand, "alerts", "channels").output


def test_without_alerts_their_routes_say_so(stand):
    stand.on_loop(lambda: setattr(stand.service, "alerting", None))
    for path in ("alerts", "alerts/rules", "alerts/silences", "alerts/channels"):
        assert "alerts.enabled" in get(stand, path, 409)["error"]["message"]
    assert get(stand, "alerts/incidents")["incidents"] == []


def test_jobs_can_be_seen_and_run(stand):
    names = [job["name"] for job in get(stand, "jobs")["jobs"]]
    assert names == ["sampling", "alert_evaluation", "retention", "idle_audit", "idle_defrag"]
    assert run_cli(stand, "jobs", "run", "sampling").exit_code == 0
    assert run_cli(stand, "jobs", "run", "retention").exit_code == 0
    assert run_cli(stand, "jobs", "run", "nobody").exit_code == 4
    jobs = {job["name"]: job for job in get(stand, "jobs")["jobs"]}
    assert jobs["sampling"]["runs"]["ok"] == 1
    assert jobs["idle_audit"]["last_run_at"] is None
    table = run_cli(stand, "jobs", "list").output
    assert "retention" in table
    assert "not yet" in table


def test_samples_of_the_charts_are_kept(stand):
    evaluate(stand)
    run_cli(stand, "jobs", "run", "sampling")
    path = "samples?metric=memd_pool_watermark_ratio"
    assert stand.wait_for(lambda: get(stand, path)["series"])


def test_the_idle_audit_asks_the_engine_only_when_there_is_something_to_find(stand):
    def audit():
        return stand.http.post("/admin/v1/jobs/idle_audit/run").json()

    stand.wait_for(lambda: stand.client.snapshot)
    first = audit()
    assert first["last_outcome"] == "error"  # the scripted engine's answer is no report
    again = audit()
    assert again["last_outcome"] == "skipped"
    assert again["last_error"] == "nothing has happened since the last one"


def test_a_rendered_file_needs_no_daemon(tmp_path):
    done = CliRunner().invoke(app, ["alerts", "render", "--runbooks", "https://wiki/memd/"])
    assert done.exit_code == 0
    assert "runbook_url: https://wiki/memd/MemdDown.md" in done.output
    broken = tmp_path / "broken.yml"
    broken.write_text("rules: 7")
    done = CliRunner().invoke(app, ["alerts", "render", "--rules", str(broken)])
    assert done.exit_code == 1
    assert "broken.yml: rules" in done.output


@pytest.mark.parametrize(
    ("urls", "instance"),
    [
        (["http://127.0.0.1:8733"], "127.0.0.1:8733"),
        (["unix:///run/memd.sock", "http://[::1]:80"], "[::1]:80"),
        (["https://gpu7:8733"], "gpu7:8733"),
    ],
)
def test_the_instance_is_what_prometheus_calls_it(urls, instance):
    assert instance_of(urls) == instance


def test_a_daemon_without_an_address_of_its_own_goes_by_its_host(monkeypatch):
    monkeypatch.setattr("memd.chores.gethostname", lambda: "gpu7")
    assert instance_of(["http://0.0.0.0:8733"]) == "gpu7:8733"
    assert instance_of(["unix:///run/memd.sock"]) == "gpu7"


def keep(stand, metric, values, labels, step=15.0):
    """Samples of the past, the last of them just now."""
    now = time.time()
    rows = []
    for number, value in enumerate(reversed(values)):
        at = now - number * step - 1
        rows.append({"time": at, "metric": metric, "labels": labels, "value": value})
        rows.append(
            {"time": at, "metric": "memd_alerts_firing", "labels": {"severity": "page"}, "value": 0}
        )
    stand.store.add_rows("samples", rows)
    assert stand.wait_for(lambda: stand.store.queued_rows == 0)


def test_a_rule_is_tried_with_another_limit_and_nothing_changes(stand):
    values = [0.1] * 10 + [0.4] * 50 + [0.1] * 10
    keep(stand, "memd_pool_active_ratio", values, {"gpu": "0"})
    keep(stand, "memd_pool_watermark_ratio", [0.9] * 70, {"gpu": "0", "level": "high"})
    before = get(stand, "alerts/rules")
    found = get(stand, "alerts/rules/MemdPoolPressure/trial?threshold=0.3&for_seconds=60")
    assert found["until"] - found["since"] == 7 * 86_400
    assert (found["direction"], found["unit"]) == ("above", "ratio")
    assert found["as_it_is"]["fired"] == 0
    assert (found["as_it_is"]["threshold"], found["as_it_is"]["for_seconds"]) == (None, 600)
    tried = found["tried"]
    assert (tried["threshold"], tried["fired"], tried["pending_only"]) == (0.3, 1, 0)
    assert tried["firing_seconds"] == pytest.approx(50 * 15 - 60, abs=16)
    (firing,) = tried["firings"]
    assert (firing["labels"], firing["peak"]) == ({"gpu": "0"}, 0.4)
    assert firing["fired_at"] < firing["resolved_at"]
    assert 0 < found["covered_seconds"] <= 70 * 15
    assert get(stand, "alerts/rules") == before
    assert get(stand, "alerts")["alerts"] == []
    shown = run_cli(stand, "alerts", "try", "MemdPoolPressure", "--threshold", "30%", "--for", "1m")
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.output.splitlines()]
    assert lines[2][:4] == ["as", "it", "is", "above"]
    assert lines[3][:5] == ["tried", "above", "30%", "28.5%", "60"]
    assert "gpu=0" in shown.output
    answer = run_cli(
        stand, "alerts", "try", "MemdPoolPressure", "--since", "1h", "--format", "json"
    )
    assert json.loads(answer.output)["tried"]["fired"] == 0


def test_a_trial_that_cannot_be_says_why(stand):
    path = "alerts/rules/{}/trial"
    assert "MemdNobody" in get(stand, path.format("MemdNobody"), 404)["error"]["message"]
    assert "Prometheus" in get(stand, path.format("MemdDown"), 409)["error"]["message"]
    slow = path.format("MemdTokensSlow")
    for query in ("threshold=nan", "for_seconds=-1", "since=9&until=3", "since=1&until=9e9"):
        assert get(stand, f"{slow}?{query}", 400)["error"]["type"] == "invalid_request_error"
    assert run_cli(stand, "alerts", "try", "MemdTokensSlow", "--threshold", "much").exit_code == 2
    assert run_cli(stand, "alerts", "try", "MemdTokensSlow", "--for", "long").exit_code == 2


def test_what_rules_look_at_is_kept_when_it_changes_or_now_and_then(stand):
    rules = stand.alerting.rules
    samples = RuleSamples(rules, frozenset({"memd_requests_running"}))

    def scrape(value):
        return [
            KeptSample("memd_state", {"state": "ready"}, value),
            KeptSample("memd_state", {"state": "loading"}, 1.0),
            KeptSample("memd_requests_running", {}, 3.0),
            KeptSample("memd_setting", {"key": "engine.max_waiting"}, float("nan")),
            KeptSample("memd_other", {}, 1.0),
        ]

    ready = ("memd_state", {"state": "ready"})
    assert samples.due(1000.0, scrape(1.0)) == [(*ready, 1.0)]
    assert samples.due(1015.0, scrape(1.0)) == []
    assert samples.due(1030.0, scrape(0.0)) == [(*ready, 0.0)]
    assert samples.due(1260.0, scrape(0.0)) == []
    assert samples.due(1270.0, scrape(0.0)) == [(*ready, 0.0)]
    assert samples.due(500.0, scrape(0.0)) == [(*ready, 0.0)], "the clock was set back"
    run_cli(stand, "jobs", "run", "sampling")
    path = "samples?metric=memd_config_last_reload_successful"
    assert stand.wait_for(lambda: get(stand, path)["series"])
