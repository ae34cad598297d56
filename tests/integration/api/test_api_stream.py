"""Streams and whole answers: shape, stop strings, logprobs, usage, errors, clients that leave."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from http_stand import Script, Stand, entry, say, sse

from memd.api import answer
from memd.engine.messages import Abort, Output, Submit


def events(stand: Stand, chat: bool = False, **body: Any) -> list[Any]:
    """The chunks of a stream, without [DONE], which must be there."""
    response = (stand.chat if chat else stand.complete)(stream=True, **body)
    assert response.status_code == 200, response.text
    data = sse(response.text)
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c.get("text") or c.get("delta", {}).get("content", "") for c in choices)


def test_a_chat_stream(stand: Stand) -> None:
    response = stand.chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    chunks = [json.loads(each) for each in sse(response.text)[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(chunks) == "Hello!"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    for key in ("id", "created", "model", "object", "system_fingerprint"):
        assert len({chunk[key] for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}])
def test_no_usage_unless_asked(stand: Stand, chat: bool, options: dict[str, bool] | None) -> None:
    chunks = events(stand, chat, stream_options=options)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("chat", [False, True])
def test_usage_comes_last(stand: Stand, chat: bool) -> None:
    chunks = events(
        stand, chat, stream_options={"include_usage": True, "include_obfuscation": True}
    )
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    whole = (stand.chat if chat else stand.complete)().json()
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_token_counts(stand: Stand, n: int, max_tokens: int) -> None:
    stand.engine.script = say("x" * 50, "length")
    body = {"n": n, "max_tokens": max_tokens, "ignore_eos": True}
    usage = stand.complete(**body).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, n * max_tokens)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert usage["memd"] == {
        "cached_tokens_by_tier": {"device": 3, "host": 0, "disk": 0},
        "pinned_tokens": 0,
    }
    streamed = events(stand, **body, stream_options={"include_usage": True})
    assert streamed[-1]["usage"] == usage


def test_a_batch_of_prompts_with_choices(stand: Stand) -> None:
    stand.engine.script = lambda submit: say(bytes(submit.prompt_tokens))(submit)
    body = {"prompt": ["ab", "cde"], "n": 2}
    choices = stand.complete(**body).json()["choices"]
    assert [(c["index"], c["text"]) for c in choices] == [
        (0, "ab"),
        (1, "ab"),
        (2, "cde"),
        (3, "cde"),
    ]
    chunks = events(stand, **body)
    assert [text_of(chunks, index) for index in range(4)] == ["ab", "ab", "cde", "cde"]
    assert stand.complete(**body).json()["usage"]["prompt_tokens"] == 5


def test_best_of_keeps_the_best_mean_logprob(stand: Stand) -> None:
    texts = ["zz", "!!", "MM", "aaaa"]  # the lower the byte, the likelier
    stand.engine.script = lambda submit: say(texts[int(submit.request_id[-1])], "length")(submit)
    answer = stand.complete(n=2, best_of=4, max_tokens=4).json()
    assert [choice["text"] for choice in answer["choices"]] == ["!!", "MM"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "stop", "include", "text", "tokens"),
    [
        ("one two three", ["two"], False, "one ", 7),
        ("one two three", ["two"], True, "one two", 7),
        ("one two three", "o t", False, "one tw", 9),
        ("one two three", ["never", "three", "two"], False, "one ", 7),
        ("abX", ["XYZ"], False, "abX", 4),
    ],
)
def test_stop_strings(
    stand: Stand, stream: bool, said: str, stop: Any, include: bool, text: str, tokens: int
) -> None:
    stand.engine.script = say(said, pause=0.01)
    before = len(stand.engine.of(Abort))
    body = {"stop": stop, "include_stop_str_in_output": include}
    if stream:
        chunks = events(stand, **body, stream_options={"include_usage": True})
        got, usage = text_of(chunks), chunks[-1]["usage"]
        reason = chunks[-2]["choices"][0]["finish_reason"]
    else:
        answer = stand.complete(**body).json()
        choice = answer["choices"][0]
        got, usage, reason = choice["text"], answer["usage"], choice["finish_reason"]
    assert (got, usage["completion_tokens"], reason) == (text, tokens, "stop")
    if tokens < len(said):
        assert stand.wait_for(lambda: len(stand.engine.of(Abort)) > before)
        assert stand.engine.of(Abort)[-1].reason == "stop"


def test_no_stop_before_min_tokens(stand: Stand) -> None:
    stand.engine.script = say("a.b.c.d")
    assert stand.complete(stop=".", min_tokens=4).json()["choices"][0]["text"] == "a.b"
    assert stand.complete(stop=".", min_tokens=5).json()["choices"][0]["text"] == "a.b.c"


def test_the_token_that_ends_is_no_text(stand: Stand) -> None:
    stand.engine.script = say("ab.", "stop")
    assert stand.complete(stop_token_ids=[46]).json()["choices"][0]["text"] == "ab"
    body = {"stop_token_ids": [46], "include_stop_str_in_output": True}
    assert stand.complete(**body).json()["choices"][0]["text"] == "ab."


SAID = "a😀é stop"


@pytest.mark.parametrize("stop", [None, "stop", " s"])
def test_logprobs_of_split_characters(stand: Stand, stop: str | None) -> None:
    stand.engine.script = say(SAID, "length")
    body = {"logprobs": True, "top_logprobs": 3, "stop": stop, "max_completion_tokens": 50}
    whole = stand.chat(**body).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"]
    joined = b"".join(bytes(each["bytes"]) for each in entries).decode()
    assert joined == SAID[: SAID.index(stop) + len(stop)] if stop else SAID
    assert joined.startswith(whole["choices"][0]["message"]["content"])
    assert [e["token"] for e in entries[:3]] == ["a", "bytes:\\xf0", "bytes:\\x9f"]
    assert [top["bytes"] for top in entries[1]["top_logprobs"]] == [[0xF0], [0xF1], [0xF2]]
    assert entries[0]["logprob"] == pytest.approx(entry(97, 0).logprob)
    chunks = events(stand, True, **body)
    streamed = [
        each
        for chunk in chunks
        for each in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]
    assert "\ufffd" not in text_of(chunks)


def test_completion_logprobs(stand: Stand) -> None:
    stand.engine.script = say("é!", "length")
    body = {"logprobs": 1, "max_tokens": 3}
    whole = stand.complete(**body).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert whole["text_offset"] == [0, 0, 1]
    assert whole["token_logprobs"] == pytest.approx([-1.95, -1.69, -0.33])
    assert list(whole["top_logprobs"][2]) == ["!"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in events(stand, **body)]
    for key in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [each for part in parts for each in part[key]] == whole[key]


@pytest.mark.parametrize(("max_tokens", "entries"), [(1, 13), (0, 12)])
def test_echo_with_logprobs(stand: Stand, max_tokens: int, entries: int) -> None:
    body = {"prompt": "twelve bytes", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    choice = stand.complete(**body).json()["choices"][0]
    assert choice["text"] == "twelve bytesH"[:entries]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {entries}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1] == pytest.approx(-ord("w") / 100)
    assert text_of(events(stand, **body)) == choice["text"]


def test_echo_of_ids(stand: Stand) -> None:
    choice = stand.complete(prompt=[104, 105], echo=True).json()["choices"][0]
    assert choice["text"] == "hiHello!"


def test_token_ids_on_request(stand: Stand) -> None:
    choice = stand.chat(return_token_ids=True).json()["choices"][0]
    assert choice["token_ids"] == [*b"Hello!", 257]
    assert bytes(choice["prompt_token_ids"]) == b"<user>hi<assistant>"
    chunks = [chunk["choices"][0] for chunk in events(stand, return_token_ids=True)]
    assert chunks[0]["prompt_token_ids"] == [104, 105]
    assert [each for chunk in chunks[1:] for each in chunk["token_ids"]] == [*b"Hello!", 257]


def test_special_tokens_are_skipped_unless_wanted(stand: Stand) -> None:
    def script(submit: Submit) -> Iterator[Output | float]:
        yield Output(submit.request_id, [97, 257, 98], finish_reason="length")

    stand.engine.script = script
    assert stand.complete().json()["choices"][0]["text"] == "ab"
    shown = stand.complete(skip_special_tokens=False).json()["choices"][0]["text"]
    assert shown == "a<|end|>b"


def failing(after: int, code: str) -> Script:
    def script(submit: Submit) -> Iterator[Output | float]:
        for _ in range(after):
            yield Output(submit.request_id, [97])
        error = "the model failed on this request"
        yield Output(submit.request_id, finish_reason="error", error=error, error_code=code)

    return script


@pytest.mark.parametrize(
    ("code", "status"),
    [("model_error", 500), ("context_length_exceeded", 400), ("pool_exhausted", 503)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token(
    stand: Stand, stream: bool, code: str, status: int
) -> None:
    stand.engine.script = failing(0, code)
    response = stand.complete(stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code


def test_an_error_in_mid_stream(stand: Stand) -> None:
    stand.engine.script = failing(3, "numerical_error")
    response = stand.chat(stream=True)
    assert response.status_code == 200
    *chunks, error, done = sse(response.text)
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "numerical_error"
    assert text_of([json.loads(chunk) for chunk in chunks]) == "aaa"
    assert '"finish_reason":"stop"' not in response.text
    stand.engine.script = say("Hello!")
    assert stand.complete().status_code == 200


def test_one_failed_choice_ends_its_request_only(stand: Stand) -> None:
    def script(submit: Submit) -> Iterator[Output | float]:
        fails = submit.request_id.endswith("-1")
        return (failing(1, "model_error") if fails else say("x" * 150, None, 0.01))(submit)

    stand.engine.script = script
    before = len(stand.engine.of(Abort))
    assert stand.complete(n=3, max_tokens=150).status_code == 500
    assert stand.wait_for(lambda: len(stand.engine.of(Abort)) == before + 2)


def test_silence_is_filled_with_comments(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "PING_SECONDS", 0.03)
    stand.engine.script = say("abc", "length", pause=0.1)
    response = stand.chat(stream=True, max_tokens=3)
    assert response.text.count(": ping\n\n") >= 2
    assert text_of([json.loads(each) for each in sse(response.text)[:-1]]) == "abc"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("silent", [False, True])
def test_a_client_that_leaves_ends_its_request(stand: Stand, stream: bool, silent: bool) -> None:
    """Also while the engine has nothing to say, so that no failed write gives it away."""
    stand.engine.script = say("x" * 150, "length", pause=30.0 if silent else 0.02)
    before, submitted = len(stand.engine.of(Abort)), len(stand.engine.of(Submit))
    body = {"model": "tiny", "prompt": "hi", "stream": stream, "max_tokens": 150, "n": 2}
    # The read of a whole answer times out, which closes the connection.
    with (
        contextlib.suppress(httpx2.ReadTimeout),
        stand.http.stream("POST", "/v1/completions", json=body, timeout=0.2) as response,
    ):
        next(response.iter_raw())
    assert stand.wait_for(lambda: len(stand.engine.of(Submit)) == submitted + 2)
    assert stand.wait_for(lambda: len(stand.engine.of(Abort)) == before + 2, seconds=1.0)
    assert stand.engine.of(Abort)[-1].reason == "abort"
    assert stand.client.open == {}


def test_two_requests_with_one_id(stand: Stand) -> None:
    stand.engine.script = say("Hello!", pause=0.05)
    headers = {"x-request-id": "mine"}
    body = {"model": "tiny", "prompt": "hi", "stream": True, "request_id": "mine"}
    with stand.http.stream("POST", "/v1/completions", json=body, headers=headers) as first:
        with stand.http.stream("POST", "/v1/completions", json=body, headers=headers) as second:
            assert second.headers["x-request-id"] == "mine"
            next(second.iter_raw())
        text = first.read().decode()
    assert first.headers["x-request-id"] == "mine"
    assert text_of([json.loads(each) for each in sse(text)[:-1]]) == "Hello!"
    assert stand.wait_for(lambda: not stand.client.open)


@pytest.mark.parametrize(
    ("header", "body_id", "echoed"),
    [
        ("abc-1", None, "abc-1"),
        ("abc-1", "other", "abc-1"),
        (None, "from-body", "from-body"),
        ("bad id\twith spaces", None, None),
        (None, "x" * 128, "x" * 128),
        (None, "bad id", None),
    ],
)
def test_request_ids(
    stand: Stand, header: str | None, body_id: str | None, echoed: str | None
) -> None:
    body = {"model": "tiny", "prompt": "hi", "request_id": body_id}
    headers = {"x-request-id": header} if header else {}
    response = stand.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    got = response.headers["x-request-id"]
    assert got == echoed if echoed else got.startswith("req-")
    assert int(response.headers["openai-processing-ms"]) >= 0


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_ends(make_stand: Callable[..., Any], stream: bool) -> None:
    stand = make_stand()
    stand.engine.script = say("x" * 100, None, 0.02)
    threading.Timer(0.2, lambda: stand.on_loop(lambda: stand.client.fail("gone"))).start()
    response = stand.complete(stream=stream, max_tokens=100)
    if stream:
        assert json.loads(sse(response.text)[-2])["error"]["code"] == "engine_failed"
        assert sse(response.text)[-1] == "[DONE]"
    else:
        assert response.status_code == 503
    assert stand.complete().json()["error"]["code"] == "engine_failed"
    assert stand.http.get("/health/live").status_code == 503
    assert stand.http.get("/metrics").status_code == 200


def test_a_fault_of_our_own_shows_an_id_only(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stand.service, "model", object())
    response = stand.complete()
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["message"] == f"internal error, request {response.headers['x-request-id']}"
    assert error["code"] == "internal_error"
    assert "AttributeError" not in response.text
