"""The admin API: state, actions, live settings."""

import threading

import pytest
from http_stand import Stand, engine_snapshot, say, sse

from memd.engine.messages import Abort, ApplySettings, PoolCommand, Preempt, SetPriority, StepReport

HIGH, LOW = "memory.watermark.high", "memory.watermark.low"


@pytest.fixture
def fresh(make_stand) -> Stand:
    return make_stand()


def change(stand: Stand, changes: dict, revision: int = 1, **more):
    body = {"revision": revision, "reason": "test", "changes": changes, **more}
    return stand.http.patch("/admin/v1/settings", json=body)


def marks(stand: Stand) -> tuple[float, float]:
    live = stand.http.get("/admin/v1/settings").json()["live"]
    return live[HIGH]["value"], live[LOW]["value"]


def test_status(stand: Stand):
    status = stand.http.get("/admin/v1/status").json()
    assert status["state"] == "ready"
    assert status["engine"] == {"pid": 4321, "restarts": 0}
    assert status["settings_revision"] == 1
    assert status["requests"] == {"running": 0, "waiting": 0}
    assert status["pool"]["capacity_pages"] == 64
    assert status["pool"]["elastic"] is True
    assert status["pool"]["limit_waits_for"] is None
    assert status["pool"]["watermark"] == {"high": 0.9, "low": 0.7}
    assert status["model"] == {"name": "tiny", "architecture": "scripted"}


def test_pool_and_listings(stand: Stand):
    pool = stand.http.get("/admin/v1/pool").json()
    assert pool["layout"]["page_tokens"] == 16
    assert pool["active_pages"] + pool["cached_pages"] + pool["free_pages"] == 64
    assert (pool["fragmentation_ratio"], pool["limit_pages"]) == (0.0, 64)
    assert "defrag_step_seconds" not in pool
    assert stand.http.get("/admin/v1/pool/blocks?offset=2&limit=3").status_code == 200
    assert stand.http.get("/admin/v1/prefixes?limit=5").status_code == 200


@pytest.mark.parametrize(
    ("action", "body", "pages"),
    [
        ("reclaim", {"pages": 5}, 5),
        ("reclaim", None, None),
        ("flush", {}, None),
        ("audit", {}, None),
        ("defrag", {}, None),
    ],
)
def test_pool_actions(stand: Stand, action: str, body: dict | None, pages: int | None):
    content = {} if body is None else {"json": body}
    response = stand.http.post(f"/admin/v1/pool/{action}", **content)
    assert response.status_code == 200
    command = stand.engine.of(PoolCommand)[-1]
    assert (command.action, command.pages) == (action, pages)


def test_a_body_of_unknown_length_counts(stand: Stand):
    stand.http.post("/admin/v1/pool/reclaim", content=iter([b'{"pages"', b":7}"]))
    assert stand.engine.of(PoolCommand)[-1].pages == 7


def test_a_refused_action_is_409(stand: Stand):
    stand.engine.refuse = "busy"
    try:
        response = stand.http.post("/admin/v1/pool/flush")
    finally:
        stand.engine.refuse = None
    assert response.status_code == 409
    assert response.json()["error"]["message"] == "busy"
    assert stand.http.post("/admin/v1/pool/reclaim", json={"pages": 0}).status_code == 400


def test_requests_are_listed_shown_preempted_and_cancelled(stand: Stand):
    stand.engine.script = say("x" * 100, pause=0.02)
    answers = []
    body = {"n": 2, "stream": True, "max_tokens": 100, "priority": 4}
    thread = threading.Thread(target=lambda: answers.append(stand.complete(**body)))
    thread.start()
    assert stand.wait_for(lambda: len(stand.client.open) == 2)
    rows = stand.http.get("/admin/v1/requests").json()["requests"]
    assert len(rows) == 2
    assert rows[0]["prompt_tokens"] == 2
    assert rows[0]["priority"] == 4
    request_id = rows[0]["id"].rpartition("-")[0]
    shown = stand.http.get(f"/admin/v1/requests/{request_id}").json()
    assert [row["id"] for row in shown["sequences"]] == [row["id"] for row in rows]
    assert stand.http.post(f"/admin/v1/requests/{rows[1]['id']}/preempt").status_code == 200
    assert stand.engine.of(Preempt)[-1].request_id == rows[1]["id"]
    path = f"/admin/v1/requests/{request_id}"
    changed = stand.http.patch(path, json={"priority": -3, "reason": "urgent"})
    assert changed.json() == {"id": request_id, "priority": -3}
    assert {command.priority for command in stand.engine.of(SetPriority)} == {-3}
    assert {row["priority"] for row in stand.http.get(path).json()["sequences"]} == {-3}
    assert stand.http.patch(path, json={"priority": 2**31}).status_code == 400
    cancelled = stand.http.delete(f"/admin/v1/requests/{request_id}")
    assert cancelled.json() == {"id": request_id, "cancelled": 2}
    thread.join(60)
    assert '"code":"cancelled"' in sse(answers[0].text)[-2]
    assert sse(answers[0].text)[-1] == "[DONE]"
    assert stand.wait_for(lambda: len(stand.engine.of(Abort)) >= 2)
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/preempt")):
        assert stand.http.request(method, f"/admin/v1/requests/none{path}").status_code == 404
    missing = stand.http.patch("/admin/v1/requests/none", json={"priority": 1})
    assert missing.status_code == 404


def test_a_cancelled_whole_answer_is_an_error(stand: Stand):
    stand.engine.script = say("x" * 100, pause=0.02)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(stand.complete(max_tokens=100)))
    thread.start()
    assert stand.wait_for(lambda: stand.client.open)
    stand.http.delete(f"/admin/v1/requests/{next(iter(stand.client.open))}")
    thread.join(60)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "cancelled"
    assert answers[0].headers["x-should-retry"] == "false"


def test_a_change_reaches_the_engine_before_it_counts(fresh: Stand):
    answer = change(fresh, {HIGH: "85%", LOW: 0.6}, who="me").json()
    assert answer["revision"] == 2
    assert answer["settings"]["memory"]["watermark"] == {"high": 0.85, "low": 0.6}
    assert answer["changes"] == {
        HIGH: {"old": 0.9, "new": 0.85},
        LOW: {"old": 0.7, "new": 0.6},
    }
    applied = fresh.engine.of(ApplySettings)[-1]
    assert (applied.revision, applied.values) == (2, {HIGH: 0.85, LOW: 0.6})
    fresh.engine.refuse = "no"
    assert change(fresh, {HIGH: "95%"}, 2).status_code == 409
    assert marks(fresh) == (0.85, 0.6)
    assert len(fresh.http.get("/admin/v1/settings/history").json()["history"]) == 2


@pytest.mark.parametrize(
    ("high", "low"),
    [
        (0.8, 0.9),
        (0.9, 0.9),
        (1.2, 0.5),
        (0.9, -0.1),
        (0.9, "0.9"),
        (0.9, 0),
        (None, 0.5),
        ("x", 0.5),
    ],
)
def test_marks_that_cannot_work_are_refused(stand: Stand, high: object, low: object):
    response = change(stand, {HIGH: high, LOW: low})
    assert response.status_code == 400
    assert "memory.watermark" in response.json()["error"]["param"]
    assert marks(stand) == (0.9, 0.7)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"changes": {"server.port": 1}}, 400, "server.port"),
        ({"changes": {"no.such": 1, "model.path": "x"}}, 400, "no.such, model.path"),
        ({"changes": {}}, 400, "changes"),
        ({"changes": {HIGH: 0.8}, "reason": ""}, 400, "reason"),
        ({"changes": {HIGH: 0.8}, "revision": 7}, 409, "revision"),
        ({"changes": {HIGH: 0.8}, "revision": "1"}, 400, "revision"),
        ({"changes": {"memory.watermark": 5}}, 400, "memory.watermark"),
    ],
)
def test_a_bad_change_applies_nothing(stand: Stand, body: dict, status: int, param: str):
    before = len(stand.engine.of(ApplySettings))
    response = stand.http.patch(
        "/admin/v1/settings", json={"revision": 1, "reason": "test", **body}
    )
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    if status == 409:
        assert response.json()["revision"] == 1
    assert len(stand.engine.of(ApplySettings)) == before


def test_nan_is_refused(stand: Stand):
    body = b'{"revision":1,"reason":"x","changes":{"memory.watermark.high":NaN}}'
    assert stand.http.patch("/admin/v1/settings", content=body).status_code == 400


def test_undo_goes_back_step_by_step(fresh: Stand):
    change(fresh, {HIGH: 0.8}, 1)
    change(fresh, {HIGH: 0.85}, 2)
    seen = []
    for _ in range(2):
        response = fresh.http.post("/admin/v1/settings/undo", json={"reason": "back"})
        assert response.status_code == 200
        seen.append(marks(fresh)[0])
    assert seen == [0.8, 0.9]
    assert fresh.engine.of(ApplySettings)[-1].values == {HIGH: 0.9}
    response = fresh.http.post("/admin/v1/settings/undo", json={"reason": "back"})
    assert response.status_code == 409
    history = fresh.http.get("/admin/v1/settings/history").json()["history"]
    assert [(row["revision"], row["kind"], row["undoes"]) for row in history] == [
        (1, "start", None),
        (2, "change", None),
        (3, "change", None),
        (4, "undo", 3),
        (5, "undo", 2),
    ]


def test_preview_changes_nothing(stand: Stand):
    def preview(changes: dict) -> dict:
        return stand.http.post("/admin/v1/settings/preview", json={"changes": changes}).json()

    answer = preview({HIGH: "60%", LOW: "40%"})
    assert answer["valid"]
    assert answer["changes"][HIGH] == {"old": 0.9, "new": 0.6}
    assert answer["effect"] == {
        "occupied_ratio": 50 / 64,
        "occupied_ratio_after": 25 / 64,
        "reclaimed_pages": 25,
        "reclaim_seconds": None,
        "host_evicted_pages": 0,
        "limit_pages": 64,
        "given_back_bytes": 0,
    }
    assert preview({HIGH: "95%"})["effect"]["reclaimed_pages"] == 0
    answer = preview({LOW: "95%"})
    assert not answer["valid"]
    assert "memory.watermark" in answer["problems"]
    assert marks(stand) == (0.9, 0.7)


def test_metrics_show_the_marks_in_force(fresh: Stand):
    fresh.engine.outbox.append(
        StepReport(snapshot=engine_snapshot(watermark_high=0.6, watermark_low=0.4))
    )
    wanted = 'memd_pool_watermark_ratio{gpu="0",level="high"} 0.6'
    assert fresh.wait_for(lambda: wanted in fresh.http.get("/metrics").text)


def test_a_stuck_engine_gives_an_error_in_time(fresh: Stand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(fresh.client).command, "__defaults__", (0.05,))
    fresh.engine.silent = True
    response = fresh.http.post("/admin/v1/pool/flush")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_timeout"
    assert fresh.http.get("/metrics").status_code == 200
