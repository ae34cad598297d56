"""Traces over HTTP and by `memd trace`: what is recorded, once each, and never any text."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from http_stand import Stand, byte_tokenizer, say
from typer.testing import CliRunner

from memd.api import trace_recorder
from memd.api.recovery import OpenSequence
from memd.cli import app
from memd.engine.messages import SamplingParams, Submit
from memd.keys import KeysFile, make_key
from memd.simulate.trace import TraceHeader, TraceRequest, parse_header, parse_requests

SECRET = "Xyzzy-the-planted-words-0123456789"


def start(stand: Stand, **more: Any) -> str:
    response = stand.http.post("/admin/v1/traces/start", json={"reason": "test", **more})
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def stop(stand: Stand) -> dict[str, Any]:
    response = stand.http.post("/admin/v1/traces/stop", json={"reason": "test"})
    assert response.status_code == 200, response.text
    return dict(response.json())


def listed(stand: Stand) -> list[dict[str, Any]]:
    return list(stand.http.get("/admin/v1/traces").json()["traces"])


def kept(stand: Stand, trace_id: str, count: int) -> bool:
    """Whether so many sequences of it are in the database."""
    return {each["id"]: each["sequences"] for each in listed(stand)}[trace_id] == count


def exported(stand: Stand, trace_id: str) -> tuple[TraceHeader, list[TraceRequest]]:
    response = stand.http.get(f"/admin/v1/traces/{trace_id}/export")
    assert response.status_code == 200, response.text
    first, *rest = response.content.splitlines()
    header = parse_header(first)
    return header, list(parse_requests(rest, header))


def test_a_recording_has_each_sequence_once_with_how_it_ended(make_stand):
    stand = make_stand()
    trace_id = start(stand)
    stand.complete(prompt="a" * 40, max_tokens=100)
    stand.complete(prompt="b" * 20, max_tokens=2, n=2)
    stand.engine.script = say("some text STOP and more", pause=0.02)
    stand.complete(prompt="c" * 20, max_tokens=60, stop="STOP")
    stand.engine.script = say("no end", finish="length", pause=0.5)
    body = {"model": "tiny", "prompt": "dddd", "max_tokens": 50, "stream": True}
    with stand.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_bytes())  # then the client hangs up
    assert stand.wait_for(lambda: not stand.client.open)
    told = stop(stand)
    assert (told["recorded"], told["dropped"]) == (5, 0)
    assert kept(stand, trace_id, 5)
    header, requests = exported(stand, trace_id)
    assert header.ended_at == told["ended_at"]
    assert (header.pool.page_tokens, header.pool.capacity_pages) == (16, 64)
    assert header.model["name"] == "tiny"
    assert header.settings["memory.watermark.high"] == 0.9
    assert [each.outcome for each in requests] == ["stop", "length", "length", "stop", "abort"]
    assert [each.prompt_tokens for each in requests] == [40, 20, 20, 20, 4]
    assert [each.output_tokens for each in requests][:3] == [len("Hello!") + 1, 2, 2]
    assert requests[1].request == requests[2].request != requests[0].request
    assert [each.max_tokens for each in requests] == [100, 2, 2, 60, 50]
    assert {each.cached_tokens for each in requests} == {3}
    assert [len(each.pages) for each in requests][:3] == [2, 1, 1]  # 40 + 6 and 20 + 1 tokens


def test_digests_tell_what_is_shared_within_a_namespace_and_a_recording(make_stand):
    stand = make_stand()
    first = start(stand)
    common = "the same beginning, two pages long"
    for prompt, salt in (("", "s"), (" and an end of its own", "s"), ("", None), ("", "other")):
        stand.complete(prompt=common + prompt, max_tokens=1, cache_salt=salt)
    stop(stand)
    second = start(stand)
    stand.complete(prompt=common, max_tokens=1, cache_salt="s")
    stop(stand)
    assert kept(stand, first, 4)
    assert kept(stand, second, 1)
    one, longer, bare, other = exported(stand, first)[1]
    assert len(one.pages) == 2
    assert longer.pages[:2] == one.pages
    assert one.namespace == longer.namespace
    assert len({one.namespace, bare.namespace, other.namespace}) == 3
    assert not set(one.pages) & {*bare.pages, *other.pages}
    later = exported(stand, second)[1][0]
    assert not {*later.pages, later.namespace, later.request} & {
        name for each in (one, longer) for name in (*each.pages, each.namespace, each.request)
    }


def test_nothing_of_a_text_is_in_database_export_or_log(make_stand, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    tokenizer = byte_tokenizer()
    stand = make_stand(tokenizer)
    stand.engine.script = say(f"answer {SECRET[::-1]}")
    trace_id = start(stand)
    stand.complete(prompt=f"{SECRET} and {SECRET}", max_tokens=60, cache_salt=SECRET)
    stop(stand)
    assert kept(stand, trace_id, 1)
    export = stand.http.get(f"/admin/v1/traces/{trace_id}/export").content
    logged = "\n".join(record.getMessage() for record in caplog.records).encode()
    stored = b"".join(path.read_bytes() for path in (tmp_path / "state").iterdir())
    assert trace_id.encode() in stored
    ids = json.dumps(tokenizer.encode(SECRET, True))[1:40].encode()
    for planted in (SECRET.encode(), SECRET[::-1].encode(), ids, SECRET[:12].encode().hex()):
        needle = planted.encode() if isinstance(planted, str) else planted
        for place in (export, logged, stored):
            assert needle not in place


def test_one_recording_at_a_time_and_none_without_an_engine(make_stand, tmp_path):
    stand = make_stand()
    assert stand.http.post("/admin/v1/traces/stop", json={"reason": "r"}).status_code == 409
    trace_id = start(stand)
    again = stand.http.post("/admin/v1/traces/start", json={"reason": "r"})
    assert again.status_code == 409
    assert trace_id in again.json()["error"]["message"]
    assert stand.http.get("/admin/v1/traces").json()["recording"] == trace_id
    stop(stand)
    assert stand.http.get("/admin/v1/traces").json()["recording"] is None
    missing = stand.http.get("/admin/v1/traces/nothing/export")
    assert missing.status_code == 404
    (tmp_path / "b").mkdir()
    loading = make_stand(loaded=False, directory=tmp_path / "b")
    refused = loading.http.post("/admin/v1/traces/start", json={"reason": "r"})
    assert refused.status_code == 503


def test_the_setting_records_all_the_time_and_ends_by_itself(make_stand):
    stand = make_stand()

    def change(value: bool) -> None:
        revision = stand.http.get("/admin/v1/settings").json()["revision"]
        body = {"revision": revision, "reason": "r", "changes": {"trace.record": value}}
        assert stand.http.patch("/admin/v1/settings", json=body).status_code == 200

    change(True)
    stand.complete(prompt="first", max_tokens=1)
    trace_id = stand.http.get("/admin/v1/traces").json()["recording"]
    assert trace_id is not None
    assert stand.http.post("/admin/v1/traces/stop", json={"reason": "r"}).status_code == 409
    assert stand.http.post("/admin/v1/traces/start", json={"reason": "r"}).status_code == 409
    assert kept(stand, trace_id, 1)
    change(False)
    stand.complete(prompt="second", max_tokens=1)
    assert stand.wait_for(lambda: listed(stand)[0]["state"] == "ended", 30)
    assert [(each["kind"], each["sequences"]) for each in listed(stand)] == [("continuous", 1)]


def test_what_is_open_at_the_end_is_part_of_it_and_what_was_before_the_start_is_not(make_stand):
    stand = make_stand()
    stand.engine.script = say("slow", finish="length", pause=30.0)
    body = {"model": "tiny", "prompt": "x" * 20, "max_tokens": 9, "stream": True}
    with stand.http.stream("POST", "/v1/completions", json=body) as before:
        first = before.iter_bytes()  # a reader that is forgotten hangs up
        next(first)
        trace_id = start(stand)
        with stand.http.stream("POST", "/v1/completions", json=body) as during:
            second = during.iter_bytes()
            next(second)
            stop(stand)
    assert kept(stand, trace_id, 1)
    assert stand.wait_for(lambda: not stand.client.open)
    (request,) = exported(stand, trace_id)[1]
    assert (request.outcome, request.output_tokens) == ("open", 1)


def test_a_full_queue_drops_and_counts_and_requests_go_on(make_stand, monkeypatch):
    monkeypatch.setattr(trace_recorder, "QUEUE_SEQUENCES", 2)
    stand = make_stand()
    held = threading.Event()
    hold = stand.store.add_rows

    def add_rows(name: Any, rows: Any) -> None:
        if name == "trace_requests":
            held.wait(60)
        hold(name, rows)

    monkeypatch.setattr(stand.store, "add_rows", add_rows)
    trace_id = start(stand)
    for _ in range(6):
        assert stand.complete(max_tokens=1).status_code == 200
    held.set()
    told = stop(stand)
    assert told["recorded"] + told["dropped"] == 6
    assert told["recorded"] in (2, 3)  # in the queue, and in the thread's hands
    assert kept(stand, trace_id, told["recorded"])
    assert exported(stand, trace_id)[0].dropped == told["dropped"]
    dropped = f'memd_trace_requests_total{{outcome="dropped"}} {told["dropped"]}.0'
    assert dropped in stand.http.get("/metrics").text


def row(names: bool, **more: Any) -> dict[str, Any]:
    """What a recording keeps of a sequence."""
    pool = trace_recorder.TracePool(16, 1024, 16384, 64)
    kind: Any = "name" if names else "digest"
    header = TraceHeader("id", 100.0, None, kind, {}, pool, {})
    recording = trace_recorder.Recording("id", "manual", "me", "r", 5.0, b"k" * 32, header)
    submit = Submit("cmpl-1-0", list(range(20)), SamplingParams(0, 8), **more)
    sequence = OpenSequence(submit, lambda _: None, 7.5)
    ended = trace_recorder._Ended(recording, sequence, [1, 2], "stop", 1.0)
    return trace_recorder._row(ended)


def test_tenants_are_digests_unless_names_are_wanted():
    assert row(True, tenant="acme")["tenant"] == "acme"
    assert row(False, tenant="")["tenant"] == ""
    hidden = row(False, tenant="acme")["tenant"]
    assert "acme" not in hidden
    assert hidden == row(False, tenant="acme")["tenant"] != row(False, tenant="other")["tenant"]
    assert row(False)["time"] == 102.5


def test_reading_needs_less_than_starting(make_stand, tmp_path):
    text, key = make_key("reader", ("admin:read",), "t", None, None)
    (tmp_path / "keys").touch()
    KeysFile(tmp_path / "keys").add(key)
    stand = make_stand(settings={"server.keys_file": str(tmp_path / "keys")})
    headers = {"authorization": f"Bearer {text}"}
    assert stand.http.get("/admin/v1/traces", headers=headers).status_code == 200
    body = {"reason": "r"}
    started = stand.http.post("/admin/v1/traces/start", json=body, headers=headers)
    assert started.status_code == 403


def test_the_command_line_records_exports_and_shows(make_stand, tmp_path: Path):
    stand = make_stand()
    run = CliRunner().invoke
    url = ("--url", stand.url)
    empty = run(app, ["trace", "show", *url])
    assert empty.exit_code == 1
    assert run(app, ["trace", "start", "--reason", "why not", *url]).exit_code == 0
    for _ in range(3):
        stand.complete(prompt="p" * 33, max_tokens=1)
    assert run(app, ["trace", "stop", *url]).exit_code == 0
    shown = json.loads(run(app, ["trace", "list", "--format", "json", *url]).stdout)
    trace_id = shown["traces"][0]["id"]
    assert shown["traces"][0]["reason"] == "why not"
    assert kept(stand, trace_id, 3)
    out = tmp_path / "trace.jsonl"
    assert run(app, ["trace", "export", trace_id, "-o", str(out), *url]).exit_code == 0
    assert len(out.read_bytes().splitlines()) == 4
    for source in (str(out), trace_id):
        summary = json.loads(run(app, ["trace", "show", source, "--format", "json", *url]).stdout)
        assert summary["requests"] == summary["sequences"] == 3
        assert summary["infinite_cache_hit_share"] == pytest.approx(64 / 99)
        assert summary["prompt_tokens"]["p50"] == 33
    assert "sequences" in run(app, ["trace", "show", str(out), *url]).stdout
    assert run(app, ["trace", "export", "nothing", *url]).exit_code == 4
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(out.read_bytes()[:-20])
    broken = run(app, ["trace", "show", str(cut), *url])
    assert broken.exit_code == 1
    assert "line 4" in broken.stderr
