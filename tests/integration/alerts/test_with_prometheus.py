"""One alert, watched by memd itself and by a real Prometheus with an Alertmanager."""

import threading
import time
from pathlib import Path

import httpx2
import pytest
import yaml
from memd_alerts.promql import render
from memd_alerts.rules import RULES_FILE, load_rules
from prometheus_server import needs_prometheus, scraping
from served import serving
from tiny import write_model
from webhook import alertmanager, needs_alertmanager, webhook

NAME = "MemdPoolPressure"
HOLD_SECONDS = 4


def hasty_rules(directory: Path) -> Path:
    """The shipped rules, except that pressure of the pool need not last for ten minutes."""
    rules = yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))
    (rule,) = (each for each in rules["rules"] if each["name"] == NAME)
    rule["for"] = f"{HOLD_SECONDS}s"
    path = directory / "hasty.yml"
    path.write_text(yaml.safe_dump(rules))
    return path


class Pressure:
    """Holds pages until it is told to stop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Pressure":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)

    def _run(self) -> None:
        body = {"model": "tiny", "prompt": "x" * 1000, "max_tokens": 2500}
        body |= {"ignore_eos": True, "stream": True}
        while not self._over.is_set():
            with httpx2.stream(
                "POST", f"{self._url}/v1/completions", json=body, timeout=60
            ) as answer:
                for _ in answer.iter_raw():
                    if self._over.is_set():
                        break  # hanging up gives the pages back


def states_seen(look, until, seconds):
    """The distinct answers of `look`, in order, until it gives `until`."""
    seen, deadline = [], time.monotonic() + seconds
    while True:
        for number, (known, now) in enumerate(zip(seen, look(), strict=False)):
            if not known or known[-1] != now:
                seen[number].append(now)
        if not seen:
            seen = [[each] for each in look()]
        if all(each[-1] == until for each in seen):
            return seen
        assert time.monotonic() < deadline, seen
        time.sleep(0.2)


@needs_prometheus
@needs_alertmanager
@pytest.mark.slow
def test_a_forced_alert_lives_the_same_life_in_memd_and_in_prometheus(tmp_path):
    model, rules = write_model(tmp_path / "tiny", num_layers=2), hasty_rules(tmp_path)
    rendered = tmp_path / "memd.rules.yml"
    rendered.write_text(render(load_rules(rules), "docs/runbooks", interval_seconds=1))
    channels = tmp_path / "channels.yml"
    with webhook() as from_memd, webhook() as from_alertmanager:
        channels.write_text(yaml.safe_dump({"hook": from_memd.channel}))
        channels.chmod(0o600)
        with (
            alertmanager(tmp_path / "am", from_alertmanager) as manager,
            serving(
                tmp_path,
                str(model),
                "memory.limit=8192 tokens",
                "memory.watermark.high=8%",
                "memory.watermark.low=2%",
                "alerts.evaluate_every=1s",
                f"alerts.rules={rules}",
                f"alerts.channels={channels}",
                f"alerts.alertmanager={manager}",
            ) as daemon,
            scraping(tmp_path / "prometheus", daemon.url, [rendered], manager) as prometheus,
        ):

            def in_memd():
                return [a for a in client("/admin/v1/alerts")["alerts"] if a["name"] == NAME]

            def in_prometheus():
                found = prometheus.get("alerts")["alerts"]
                return [each for each in found if each["labels"]["alertname"] == NAME]

            def client(path):
                return daemon.http.get(path).json()

            def states():
                mine, theirs = in_memd(), in_prometheus()
                return (
                    mine[0]["state"] if mine else "none",
                    theirs[0]["state"] if theirs else "none",
                )

            prometheus.wait_until(
                lambda: prometheus.query("memd_pool_active_ratio"), 60, "a first scrape"
            )
            with Pressure(daemon.url):
                mine, theirs = states_seen(states, "firing", 60)
                assert mine[-2:] == ["pending", "firing"]
                assert theirs[-2:] == ["pending", "firing"]
                ((here,), (there,)) = in_memd(), in_prometheus()
                assert here["labels"] == there["labels"]
                assert here["labels"]["instance"] == daemon.url.removeprefix("http://")
                assert here["runbook_url"] == there["annotations"]["runbook_url"]
                daemon.wait_until(lambda: from_memd.titled("[FIRING]"), 60, "memd tells")
                daemon.wait_until(lambda: from_alertmanager.of("firing"), 60, "Alertmanager tells")
            daemon.wait_until(lambda: in_memd()[0]["state"] == "resolved", 60, "resolved in memd")
            prometheus.wait_until(lambda: not in_prometheus(), 60, "resolved in Prometheus")
            daemon.wait_until(lambda: from_memd.titled("[RESOLVED]"), 60, "memd tells")
            daemon.wait_until(lambda: from_alertmanager.of("resolved"), 60, "Alertmanager tells")

            # A busy machine may bring about other alerts, such as of jobs that come late.
            titles = [each["title"] for each in from_memd.bodies if NAME in each["title"]]
            where = here["labels"]["instance"]
            assert titles == [f"[FIRING] {NAME} on {where}", f"[RESOLVED] {NAME} on {where}"]
            told = [b for b in from_alertmanager.bodies if b["groupLabels"]["alertname"] == NAME]
            assert [each["status"] for each in told] == ["firing", "resolved"]
            (alert,) = told[0]["alerts"]  # told by both, and taken as one
            assert alert["labels"] == here["labels"]

            incidents = client("/admin/v1/alerts/incidents")["incidents"]
            (incident,) = (each for each in incidents if each["name"] == NAME)
            assert incident["state"] == "resolved"
            assert incident["duration_seconds"] > 0
            assert incident["peak"] > incident["threshold"] == pytest.approx(0.08)
            counted = {
                channel: daemon.metric("memd_notifications_total", channel=channel, outcome="sent")
                for channel in ("hook", "alertmanager")
            }
            assert counted["hook"] == len(from_memd.bodies)
            assert counted["alertmanager"] >= 2
            assert daemon.metric("memd_notifications_total", outcome="failed") == 0
