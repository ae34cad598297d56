"""The settings routes: provenance, confirmation, undo of any revision, history, export, preview."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from http_stand import Stand, elastic_snapshot, engine_snapshot

from memd.config_sources import load
from memd.engine.messages import ApplySettings, StepReport
from memd.engine.snapshot_types import EngineEvent, Histogram

HIGH, LOW = "memory.watermark.high", "memory.watermark.low"
WAITING = "engine.max_waiting"
ROOT = "/admin/v1/settings"


@pytest.fixture
def fresh(make_stand: Callable[..., Stand]) -> Stand:
    return make_stand()


def change(stand: Stand, changes: dict, **more: object) -> dict:
    revision = stand.http.get(ROOT).json()["revision"]
    body = {"revision": revision, "reason": "test", "changes": changes, **more}
    response = stand.http.patch(ROOT, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def high(stand: Stand) -> float:
    return stand.http.get(ROOT).json()["settings"]["memory"]["watermark"]["high"]


def test_each_value_says_where_it_comes_from(fresh: Stand) -> None:
    before = time.time()
    change(fresh, {HIGH: "85%"}, who="kim", source="dashboard")
    answer = fresh.http.get(ROOT).json()
    live = answer["live"][HIGH]
    assert {name: live[name] for name in live.keys() - {"since", "description"}} == {
        "value": 0.85,
        "default": 0.9,
        "type": "number",
        "unit": "share of one",
        "minimum": 0,
        "maximum": 1,
        "choices": [],
        "nullable": False,
        "source": "live",
        "who": "kim",
        "reason": "test",
        "revision": 2,
        "persisted": False,
        "beneath": {"source": "default", "value": 0.9},
    }
    assert before <= live["since"] <= time.time()
    assert answer["sources"]["server.port"]["source"] == "default"
    assert answer["sources"][HIGH]["source"] == "live"
    assert answer["live"][LOW]["beneath"] is None
    assert (answer["pending"], answer["file"]) == (None, None)
    assert answer["last_reload"]["ok"]


def test_a_change_that_waits_is_shown_and_confirmed(fresh: Stand) -> None:
    answer = change(fresh, {HIGH: 0.8}, revert_after_seconds=600)
    pending = fresh.http.get(ROOT).json()["pending"]
    assert answer["pending"]["revision"] == pending["revision"] == 2
    assert 500 < pending["seconds_left"] <= 600
    assert pending["changes"] == {HIGH: {"old": 0.9, "new": 0.8}}
    body = {"revision": 2, "reason": "x", "changes": {HIGH: 0.75}}
    refused = fresh.http.patch(ROOT, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "unconfirmed")
    assert "confirm or undo it first" in refused.json()["error"]["message"]
    problems = fresh.http.post(f"{ROOT}/preview", json={"changes": {HIGH: 0.75}}).json()["problems"]
    assert "revision 2" in problems["pending"]
    assert fresh.http.post(f"{ROOT}/confirm", json={"revision": 1}).status_code == 409
    answer = fresh.http.post(f"{ROOT}/confirm", json={"revision": 2}).json()
    assert (answer["pending"], answer["revision"]) == (None, 2)
    assert high(fresh) == 0.8


def test_what_is_not_confirmed_reverts_by_itself(fresh: Stand) -> None:
    change(fresh, {HIGH: 0.8}, revert_after_seconds=1)
    assert high(fresh) == 0.8
    assert fresh.wait_for(lambda: high(fresh) == 0.9)
    assert fresh.engine.of(ApplySettings)[-1].values == {HIGH: 0.9}
    row = fresh.http.get(f"{ROOT}/history").json()["history"][-1]
    assert (row["kind"], row["source"], row["undoes"]) == ("revert", "schedule", 2)
    wanted = f'memd_setting_changes_total{{key="{HIGH}",outcome="reverted",source="schedule"}} 1.0'
    assert wanted in fresh.http.get("/metrics").text


def test_any_revision_is_undone_or_what_is_in_the_way_is_told(fresh: Stand) -> None:
    change(fresh, {HIGH: 0.8})
    change(fresh, {WAITING: 5})
    change(fresh, {HIGH: 0.85})

    def undo(revision: int) -> tuple[int, dict]:
        body = {"reason": "back", "revision": revision}
        response = fresh.http.post(f"{ROOT}/undo", json=body)
        return response.status_code, response.json()

    status, answer = undo(2)
    assert (status, answer["error"]["code"], answer["conflicts"]) == (409, "conflict", {HIGH: 4})
    assert undo(3)[1]["changes"] == {WAITING: {"old": 5, "new": 1024}}
    status, answer = undo(3)
    assert (status, answer["error"]["code"]) == (409, "nothing_to_undo")
    status, answer = undo(33)
    assert (status, answer["error"]["param"]) == (404, "revision")


def test_a_reset_ends_a_live_value(fresh: Stand) -> None:
    change(fresh, {HIGH: 0.8})
    answer = change(fresh, {}, reset=[HIGH])
    assert answer["changes"] == {HIGH: {"old": 0.8, "new": 0.9, "reset": True}}
    assert fresh.http.get(ROOT).json()["sources"][HIGH]["source"] == "default"
    body = {"revision": 3, "reason": "x", "reset": ["server.port"]}
    assert fresh.http.patch(ROOT, json=body).status_code == 400


def test_a_misspelt_safety_net_is_refused(fresh: Stand) -> None:
    body = {"revision": 1, "reason": "x", "changes": {HIGH: 0.8}, "revert_after": 60}
    response = fresh.http.patch(ROOT, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "revert_after")
    assert high(fresh) == 0.9


def test_text_that_no_database_keeps_is_refused(fresh: Stand) -> None:
    for field in ("who", "reason"):
        body = {"revision": 1, "reason": "x", "changes": {HIGH: 0.8}, field: "a\0b"}
        response = fresh.http.patch(ROOT, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_the_history_is_filtered(fresh: Stand) -> None:
    change(fresh, {HIGH: 0.8}, who="kim", source="cli")
    change(fresh, {WAITING: 5}, who="lee")
    change(fresh, {WAITING: 6}, who="kim")
    fresh.http.post(f"{ROOT}/undo", json={"reason": "back", "who": "kim"})

    def revisions(**query: object) -> list[int]:
        answer = fresh.http.get(f"{ROOT}/history", params=query)
        assert answer.status_code == 200, answer.text
        return [row["revision"] for row in answer.json()["history"]]

    assert revisions() == [1, 2, 3, 4, 5]
    assert revisions(key="memory") == [2]
    assert revisions(who="kim") == [2, 4, 5]
    assert revisions(source="cli") == [2]
    assert revisions(kind="undo") == [5]
    assert revisions(since=time.time() + 60) == []
    assert revisions(limit=2) == [4, 5]
    rows = fresh.http.get(f"{ROOT}/history").json()["history"]
    assert [row["state"] for row in rows] == [None, "in force", "in force", "taken back", None]
    assert rows[3]["taken_back_by"] == 5
    for wrong in ({"kind": "x"}, {"limit": 0}, {"since": -1}):
        assert fresh.http.get(f"{ROOT}/history", params=wrong).status_code == 400


def test_the_export_is_a_file_that_memd_reads(fresh: Stand, tmp_path: Path) -> None:
    change(fresh, {HIGH: 0.8, LOW: 0.25})
    for form in ("yaml", "toml"):
        answer = fresh.http.get(f"{ROOT}/export", params={"format": form}).json()
        file = tmp_path / f"memd.{form}"
        file.write_text(answer["text"])
        marks = load(file, environment={}).memory.watermark
        assert (marks.high, marks.low) == (0.8, 0.25)
        assert "revision 2" in answer["text"].splitlines()[0]
    assert fresh.http.get(f"{ROOT}/export", params={"format": "ini"}).status_code == 400


def test_the_diff_tells_what_a_restart_would_change(fresh: Stand) -> None:
    assert fresh.http.get(f"{ROOT}/diff").json()["differences"] == {}
    change(fresh, {HIGH: 0.8})
    answer = fresh.http.get(f"{ROOT}/diff").json()
    assert answer["differences"] == {
        HIGH: {"in_force": 0.8, "sources": 0.9, "source": "default", "after_restart": 0.9}
    }


def test_a_reload_answers_for_each_key(fresh: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    change(fresh, {HIGH: 0.8})
    monkeypatch.setenv("MEMD_MEMORY_WATERMARK_LOW", "60%")
    monkeypatch.setenv("MEMD_MEMORY_WATERMARK_HIGH", "95%")
    monkeypatch.setenv("MEMD_SERVER_PORT", "1")
    answer = fresh.http.post(f"{ROOT}/reload", json={"who": "kim", "source": "cli"})
    results = answer.json()["results"]
    assert results[LOW] == {"result": "applied", "old": 0.7, "new": 0.6}
    assert results[HIGH] == {"result": "overridden", "old": 0.8, "new": 0.95}
    assert results["server.port"] == {"result": "needs_restart", "old": 8733, "new": 1}
    assert results["model.path"]["result"] == "unchanged"
    assert fresh.engine.of(ApplySettings)[-1].values == {LOW: 0.6}
    monkeypatch.setenv("MEMD_MEMORY_WATERMARK_LOW", "99%")
    response = fresh.http.post(f"{ROOT}/reload")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_settings")
    answer = fresh.http.get(ROOT).json()
    assert answer["settings"]["memory"]["watermark"] == {"high": 0.8, "low": 0.6}
    assert not answer["last_reload"]["ok"]
    assert "low (0.99)" in answer["last_reload"]["error"]
    text = fresh.http.get("/metrics").text
    assert "memd_config_last_reload_successful 0.0" in text
    assert "memd_config_last_reload_success_timestamp_seconds" in text
    events = fresh.http.get("/admin/v1/events").status_code
    assert events in (200, 503)


def test_a_preview_tells_how_long_reclaim_takes(fresh: Stand) -> None:
    def preview(changes: dict) -> dict:
        response = fresh.http.post(f"{ROOT}/preview", json={"changes": changes})
        assert response.status_code == 200, response.text
        return response.json()

    passes = Histogram([0.1, 1.0], [4, 0, 0], 0.08)
    report = engine_snapshot(eviction_pass_seconds=passes, host_used_pages=9)
    fresh.engine.outbox.append(StepReport(snapshot=report))
    assert fresh.wait_for(lambda: fresh.client.snapshot.pool.host_used_pages == 9)
    marks = {HIGH: "60%", LOW: "40%"}
    answer = preview({**marks, "memory.reclaim_pages_per_step": 10})
    assert answer["effect"]["reclaimed_pages"] == 25
    assert answer["effect"]["reclaim_seconds"] == pytest.approx(3 * 0.02)
    assert answer["effect"]["host_evicted_pages"] == 0
    assert preview(marks)["effect"]["reclaim_seconds"] is None  # the engine's "auto" is not known
    answer = preview({"memory.host.limit": "4096 B"})
    assert answer["effect"]["host_evicted_pages"] == 5
    assert answer["effect"]["reclaim_seconds"] == 0
    assert answer["predicted"] is None
    assert "simulator" in answer["predicted_reason"]


def test_c020_marks_that_cannot_work_are_refused_wherever_they_come_from(
    fresh: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C020: also by preview, reload, reset and undo."""
    for high_mark, low_mark in ((0.8, 0.9), (0.9, 0.9), (1.2, 0.5), (0.9, -0.1), (0.9, 0)):
        changes = {HIGH: high_mark, LOW: low_mark}
        answer = fresh.http.post(f"{ROOT}/preview", json={"changes": changes}).json()
        assert not answer["valid"]
        monkeypatch.setenv("MEMD_MEMORY_WATERMARK_HIGH", str(high_mark))
        monkeypatch.setenv("MEMD_MEMORY_WATERMARK_LOW", str(low_mark))
        assert fresh.http.post(f"{ROOT}/reload").status_code == 400
    change(fresh, {LOW: 0.5})
    change(fresh, {HIGH: 0.6})
    body = {"revision": 3, "reason": "x", "changes": {}, "reset": [LOW]}
    assert fresh.http.patch(ROOT, json=body).status_code == 400
    response = fresh.http.post(f"{ROOT}/undo", json={"reason": "x", "revision": 2})
    assert response.status_code == 400
    assert "memory.watermark" in response.json()["error"]["param"]
    assert len(fresh.engine.of(ApplySettings)) == 2


def test_the_history_tells_figures_before_and_after_when_asked(fresh: Stand) -> None:
    now = time.time()
    metric = "model:memd_time_to_first_token_seconds:p95_rate5m"
    row = {"time": now - 1, "metric": metric, "labels": {"model": "tiny"}, "value": 0.25}
    fresh.store.add_rows("samples", [row])
    assert fresh.wait_for(lambda: fresh.store.queued_rows == 0)
    change(fresh, {HIGH: "85%"})
    assert "measured" not in fresh.http.get(f"{ROOT}/history").json()["history"][-1]
    start, changed = fresh.http.get(f"{ROOT}/history?measured=true").json()["history"]
    assert start["measured"] is None
    assert changed["measured"]["before"]["time_to_first_token_p95_seconds"] == 0.25
    assert changed["measured"]["before"]["inter_token_latency_p95_seconds"] is None
    assert changed["measured"]["after"] is None


def test_a_preview_of_a_lower_limit_tells_what_goes_back(fresh: Stand) -> None:
    def preview(limit: object) -> dict:
        body = {"changes": {"memory.limit": limit}}
        response = fresh.http.post(f"{ROOT}/preview", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    answer = preview("512 tokens")  # 32 of 64 pages, 16 a block
    assert answer["valid"]
    assert answer["effect"]["limit_pages"] == 32
    assert answer["effect"]["given_back_bytes"] == 16384, "3 blocks are committed, 2 are needed"
    assert answer["effect"]["reclaimed_pages"] == 28, "50 are occupied; down to 70% of 32"
    assert preview("50%")["effect"]["limit_pages"] == 32
    for refused in ("10TB", "1 tokens", "none"):
        answer = preview(refused)
        assert not answer["valid"]
        assert "memory.limit" in answer["problems"]


def test_a_limit_in_force_changes_what_requests_may_be_long(fresh: Stand) -> None:
    elastic = elastic_snapshot(limit_pages=4, max_model_len=64)
    report = msgspec.structs.replace(engine_snapshot(), elastic=elastic)
    fresh.engine.outbox.append(StepReport(snapshot=report))
    assert fresh.wait_for(lambda: fresh.client.snapshot.elastic.limit_pages == 4)
    assert fresh.http.get("/v1/models").json()["data"][0]["max_model_len"] == 64
    response = fresh.http.post("/v1/completions", json={"model": "tiny", "prompt": "x" * 70})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_what_the_engine_tells_is_in_the_history(fresh: Stand) -> None:
    seen: list = []
    fresh.client.on_event = lambda *event: seen.append(event)
    event = EngineEvent("defrag", "5 pages moved", {"moved_pages": 5})
    fresh.engine.outbox.append(StepReport(events=[event]))
    assert fresh.wait_for(lambda: seen == [("defrag", "5 pages moved", {"moved_pages": 5})])
