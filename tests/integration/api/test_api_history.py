"""The routes over the database, and what is kept of each request for text."""

import time
from pathlib import Path

import pytest
from history import samples
from http_stand import say

from memd.engine.messages import Output, SequenceUsage
from memd.keys import KeysFile, make_key
from memd.types import PrefixMiss

COUNTS = ("prompt_tokens", "generated_tokens", "cached_device_tokens", "cached_host_tokens")


def finished(stand, count=1, **query):
    """The requests of the history, newest first, once there are so many."""
    path = "/admin/v1/history/requests"
    assert stand.wait_for(
        lambda: len(stand.http.get(path, params=query).json().get("requests", ())) >= count
    )
    return stand.http.get(path, params=query).json()["requests"]


@pytest.fixture
def stand(make_stand):
    return make_stand()


def test_a_finished_request_is_kept_with_its_numbers_and_without_its_text(stand):
    before = time.time()
    answer = stand.complete(prompt="secret words", max_tokens=3, priority=7)
    [row] = finished(stand)
    assert row["request_id"] == answer.json()["id"]
    assert row["client_id"] is None
    assert (row["endpoint"], row["model"], row["outcome"]) == ("completions", "tiny", "ok")
    assert (row["finish_reason"], row["priority"], row["sequences"]) == ("length", 7, 1)
    assert [row[key] for key in COUNTS] == [12, 3, 3, 0]
    assert row["queue_seconds"] == 0.0
    assert 0 < row["time_to_first_token_seconds"] <= row["duration_seconds"]
    assert before <= row["received_at"] <= row["time"] <= time.time()
    # The scripted engine does not say what the sequence has cost.
    assert (row["peak_pages"], row["preemptions"], row["stall_seconds"]) == (None, None, None)
    assert "secret" not in str(row)


def test_what_the_engine_says_of_the_sequences_is_added_up(stand):
    def script(submit):
        usage = SequenceUsage(4, 1, 0.5) if submit.request_id.endswith("-0") else None
        usage = usage or SequenceUsage(3, 0, 0.25)
        name = submit.request_id
        yield Output(name, [65], cached_tokens=2, restored_tokens={"host": 1}, queue_seconds=0.125)
        yield Output(name, [66], finish_reason="length", usage=usage)

    stand.engine.script = script
    stand.complete(n=2)
    [row] = finished(stand)
    assert (row["sequences"], row["peak_pages"], row["preemptions"]) == (2, 7, 1)
    assert (row["stall_seconds"], row["queue_seconds"]) == (0.5, 0.125)
    assert (row["cached_device_tokens"], row["cached_host_tokens"]) == (1, 1)


def test_streams_chats_and_ids_of_clients(stand):
    headers = {"x-request-id": "mine-1"}
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "tiny", "messages": messages, "stream": True}
    stand.http.post("/v1/chat/completions", json=body, headers=headers)
    [row] = finished(stand)
    assert (row["client_id"], row["endpoint"]) == ("mine-1", "chat_completions")
    assert (row["outcome"], row["finish_reason"]) == ("ok", "stop")


def test_what_is_refused_is_kept_and_its_counts_are_unknown(stand):
    stand.complete(temperature=9)
    [row] = finished(stand)
    assert row["outcome"] == "invalid"
    assert {row[key] for key in (*COUNTS, "sequences", "finish_reason", "queue_seconds")} == {None}


def test_a_client_that_leaves_and_an_operator_that_cancels(stand):
    stand.engine.script = say("a" * 100, pause=0.05)
    with stand.http.stream(
        "POST", "/v1/completions", json={"model": "tiny", "prompt": "hi", "stream": True}
    ) as response:
        next(response.iter_bytes())
    [row] = finished(stand)
    assert row["outcome"] == "cancelled"
    assert row["finish_reason"] is None
    assert row["generated_tokens"] >= 1


def test_requests_are_found_by_outcome_and_time(stand):
    stand.complete(max_tokens=1)
    stand.complete(temperature=9)
    rows = finished(stand, 2)
    assert [row["outcome"] for row in rows] == ["invalid", "ok"]
    assert [row["outcome"] for row in finished(stand, outcome="ok")] == ["ok"]
    assert finished(stand, 0, tenant="nobody") == []
    get = stand.http.get
    answer = get("/admin/v1/history/requests", params={"limit": 1}).json()
    assert (len(answer["requests"]), answer["more"]) == (1, True)
    middle = rows[0]["time"]
    older = get("/admin/v1/history/requests", params={"until": middle}).json()["requests"]
    assert [row["outcome"] for row in older] == ["ok"]


def test_requests_of_keys_carry_their_tenant_and_those_without_are_not_kept(
    make_stand, tmp_path: Path
):
    file = KeysFile(tmp_path / "keys")
    text, key = make_key("ada", ["inference", "admin:read"], "research", None, None)
    file.add(key)
    stand = make_stand(settings={"server.keys_file": str(file.path)})
    assert stand.complete().status_code == 401
    stand.http.headers["authorization"] = f"Bearer {text}"
    stand.complete(max_tokens=1)
    [row] = finished(stand, tenant="research")
    assert row["tenant"] == "research"
    assert len(finished(stand)) == 1


def test_c118_the_wall_clock_goes_back_an_hour_inside_a_request(stand, monkeypatch):
    real, step = time.time, 0.0
    monkeypatch.setattr("memd.api.request_log.time.time", lambda: real() + step)
    for step in (0.0, -3600.0, 3600.0):  # noqa: B007
        stand.complete(max_tokens=1)
    rows = finished(stand, 3)
    times = [row["time"] for row in rows]
    assert times == sorted(times, reverse=True)
    for row in rows:
        assert 0 < row["duration_seconds"] < 60
        assert row["time"] - row["received_at"] == pytest.approx(row["duration_seconds"], abs=1e-3)


def test_events_are_listed_and_filtered(stand):
    for number in range(3):
        stand.store.add_event(f"kind{number % 2}", f"event {number}", {"number": number})
    get = stand.http.get

    def found(**query):
        answer = get("/admin/v1/events", params=query).json()
        return [row["details"]["number"] for row in answer["events"]]

    assert stand.wait_for(lambda: len(found()) == 3)
    assert found() == [2, 1, 0]
    assert found(kind="kind0") == [2, 0]
    assert found(since=time.time() + 60) == []
    [newest] = get("/admin/v1/events", params={"limit": 1}).json()["events"]
    assert newest["message"] == "event 2"


def test_samples_are_charted_in_steps(stand):
    now = float(int(time.time()))
    stand.store.add_rows("samples", samples(60, now - 60))
    assert stand.wait_for(lambda: stand.store.queued_rows == 0)
    answer = stand.http.get("/admin/v1/samples", params={"metric": "memd_test"}).json()
    assert (answer["metric"], answer["step_seconds"], answer["more"]) == ("memd_test", 15.0, False)
    assert [each["labels"] for each in answer["series"]] == [{"part": "0"}, {"part": "1"}]
    series = answer["series"][0]
    lengths = {len(series[key]) for key in ("times", "values", "lows", "highs")}
    assert len(lengths) == 1
    for low, value, high in zip(series["lows"], series["values"], series["highs"], strict=True):
        assert low <= value <= high
    fine = {"metric": "memd_test", "since": now - 10, "until": now - 5, "step": 1}
    part = stand.http.get("/admin/v1/samples", params=fine).json()["series"][1]
    assert part["values"] == part["lows"] == part["highs"]


@pytest.mark.parametrize(
    ("path", "query", "param", "words"),
    [
        ("events", {"limit": 0}, "limit", "must be at least 1, not"),
        ("events", {"since": 9, "until": 9}, "since", "since is 9.000, it must be before until"),
        ("events", {"since": "nan"}, "since", "not 'nan'"),
        ("samples", {}, "metric", "required"),
        ("samples", {"metric": "x", "since": 0, "until": 1e9, "step": 1}, "step", "5000"),
        ("history/requests", {"outcome": "great"}, "outcome", "'great', it must be one of ok"),
        ("history/requests", {"since": -1}, "since", "not '-1'"),
    ],
)
def test_wrong_queries_are_told_by_name_value_and_limit(stand, path, query, param, words):
    answer = stand.http.get(f"/admin/v1/{path}", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


def test_when_the_database_is_gone_reads_say_so_and_serving_goes_on(stand, tmp_path):
    stand.complete(max_tokens=1)
    finished(stand)
    (tmp_path / "state" / "history.db").unlink()
    answer = stand.http.get("/admin/v1/events")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "history_unavailable"
    assert answer.headers["retry-after"] == "5"
    assert stand.complete(max_tokens=1).status_code == 200
    assert len(finished(stand)) == 1  # of the new file


def test_the_status_tells_what_the_database_does(stand):
    stand.complete(max_tokens=1)
    finished(stand)
    status = stand.http.get("/admin/v1/status").json()["history"]
    assert status["state"] == "ok"
    assert status["failure"] is None
    assert status["written_rows"]["requests"] == 1
    assert sum(status["dropped_rows"].values()) == 0
    assert status["database_bytes"] > 0


def test_a_finished_request_tells_what_was_not_cached_and_why(stand):
    def script(submit):
        missed = PrefixMiss(7, 4, 3, "evicted") if submit.request_id.endswith("-1") else None
        yield Output(submit.request_id, [65], cached_tokens=2, queue_seconds=0.0, missed=missed)
        yield Output(submit.request_id, [66], finish_reason="length")

    stand.engine.script = script
    stand.complete(n=2)
    [row] = finished(stand)
    assert (row["missed_tokens"], row["missed_evicted_tokens"]) == (7, 4)
    assert (row["first_missing_token"], row["miss_reason"]) == (3, "evicted")
