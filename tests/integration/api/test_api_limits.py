"""Limits that protect the daemon: queue, time, and clients that do not send or do not read."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from http_stand import Stand, say, sse

from memd.api import outputs
from memd.engine.messages import Abort, Output, Submit

MakeStand = Callable[..., Stand]


def outcome(stand: Stand, name: str, endpoint: str = "completions") -> int:
    return stand.service.metrics.requests[endpoint, name]


def connect(stand: Stand) -> socket.socket:
    host, port = stand.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def request(body: bytes, path: str = "/v1/completions", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return (
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), size) + body
    )


def silent(submit: Submit) -> Iterator[Output | float]:
    while True:
        yield 60.0


def endless(submit: Submit) -> Iterator[Output | float]:
    while True:
        yield Output(submit.request_id, [97])


@contextlib.contextmanager
def waiting(stand: Stand, count: int) -> Iterator[None]:
    """So many requests wait in the engine; they are hung up at the end."""
    stand.engine.script = silent
    body = json.dumps({"model": "tiny", "prompt": "hi"}).encode()
    wanted = len(stand.engine.of(Submit)) + count
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(connect(stand)).sendall(request(body))
        assert stand.wait_for(lambda: len(stand.client.open) == count)
        assert stand.wait_for(lambda: len(stand.engine.of(Submit)) == wanted)
        yield
    assert stand.wait_for(lambda: not stand.client.open)


def test_a_full_queue_refuses_and_says_when_to_come_back(make_stand: MakeStand) -> None:
    stand = make_stand(settings={"engine.max_waiting": 3})
    with waiting(stand, 3):
        submitted = len(stand.engine.of(Submit))
        for stream in (False, True):
            refused = stand.complete(stream=stream)
            assert refused.status_code == 429
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
            assert "the limit is 3" in error["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.headers["x-should-retry"] == "true"
        assert len(stand.engine.of(Submit)) == submitted
        assert stand.http.get("/v1/models").status_code == 200
        change = {"revision": 1, "reason": "more", "changes": {"engine.max_waiting": 4}}
        assert stand.http.patch("/admin/v1/settings", json=change).status_code == 200
        stand.engine.script = say("Hello!")
        assert stand.complete(n=2).status_code == 429
        assert stand.complete().status_code == 200
    assert outcome(stand, "overloaded") == 3
    assert stand.complete().status_code == 200


def test_one_large_request_gets_through_an_empty_queue(make_stand: MakeStand) -> None:
    stand = make_stand(settings={"engine.max_waiting": 2})
    assert len(stand.complete(n=8).json()["choices"]) == 8


def test_the_openai_client_comes_back(make_stand: MakeStand) -> None:
    stand = make_stand(settings={"engine.max_waiting": 1})
    with (
        openai.OpenAI(base_url=f"{stand.url}/v1", api_key="-", max_retries=3) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        with waiting(stand, 1):
            answer = pool.submit(client.completions.create, model="tiny", prompt="hi")
            assert stand.wait_for(lambda: outcome(stand, "overloaded") == 1)
            stand.engine.script = say("Hello!")
        assert answer.result(30).choices[0].text == "Hello!"


def test_a_body_that_does_not_come(make_stand: MakeStand) -> None:
    stand = make_stand(settings={"server.request_timeout": 0.2})
    with connect(stand) as client:
        client.sendall(request(b'{"model":', length=100))
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer
    assert b"0.2 s" in answer
    assert stand.wait_for(lambda: outcome(stand, "timeout") == 1)


def drip(client: socket.socket, data: bytes, seconds: float) -> None:
    """Bytes one after the other, until all are sent or the other side has had enough."""
    with contextlib.suppress(OSError):
        for at in range(len(data)):
            client.sendall(data[at : at + 1])
            time.sleep(seconds)


@pytest.mark.parametrize("earlier_requests", [0, 1])
def test_a_head_that_does_not_come(make_stand: MakeStand, earlier_requests: int) -> None:
    stand = make_stand(settings={"server.request_timeout": 0.3})
    with connect(stand) as client:
        for _ in range(earlier_requests):
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                answer += client.recv(4096)
        started = time.monotonic()
        drip(client, b"GET /health HTTP/1.1\r\n" + b"x-header: y\r\n" * 50, 0.01)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - started < 3


HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"x-long: " + b"y" * 2**22,  # and no end
        HEAD + b"x-long: " + b"y" * 70_000 + b"\r\n\r\n",
        HEAD + b"".join(b"x-%d: y\r\n" % n for n in range(20_000)) + b"\r\n",
        b"GET /" + b"y" * 2**20 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["without end", "one header", "many headers", "address"],
)
def test_a_head_that_is_too_large(make_stand: MakeStand, request_bytes: bytes) -> None:
    stand = make_stand()
    answer = b""
    with connect(stand) as client, contextlib.suppress(ConnectionError):
        client.sendall(request_bytes)
        while piece := client.recv(4096):
            answer += piece
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")  # a reset may outrun it
    assert stand.http.get("/health").status_code == 200


def test_a_head_may_be_large_and_a_body_larger(make_stand: MakeStand) -> None:
    stand = make_stand()
    body = {"model": "tiny", "prompt": "Hi", "user": "y" * 200_000}
    headers = {"x-long": "y" * 60_000}
    for _ in range(2):  # over one connection
        assert stand.http.post("/v1/completions", json=body, headers=headers).status_code == 200


def test_trailers_without_end(make_stand: MakeStand) -> None:
    stand = make_stand()
    with connect(stand) as client, contextlib.suppress(ConnectionError):
        client.sendall(CHUNKED + b"2\r\n{}\r\n0\r\nx-trailer: " + b"y" * 2**22)
        while client.recv(4096):
            pass
    assert stand.http.get("/health").status_code == 200


def test_a_connection_that_says_nothing_is_closed(make_stand: MakeStand) -> None:
    stand = make_stand(settings={"server.request_timeout": 0.2})
    with connect(stand) as client:
        assert client.recv(4096) == b""


def test_a_long_answer_is_not_a_late_request(make_stand: MakeStand) -> None:
    stand = make_stand(settings={"server.request_timeout": 0.1})
    stand.engine.script = say("Hello!", pause=0.1)
    assert stand.complete().json()["choices"][0]["text"] == "Hello!"
    assert sse(stand.complete(stream=True).text)[-1] == "[DONE]"


@pytest.mark.parametrize("script", [silent, say("x" * 100, pause=0.05)])
def test_a_generation_that_takes_too_long(make_stand: MakeStand, script: object) -> None:
    stand = make_stand(settings={"server.generation_timeout": 0.3})
    stand.engine.script = script
    answer = stand.complete(max_tokens=100)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"
    assert answer.headers["x-should-retry"] == "false"
    streamed = stand.complete(stream=True, max_tokens=100)
    if script is silent:
        assert streamed.status_code == 504
    else:
        *_, last, done = sse(streamed.text)
        assert json.loads(last)["error"]["code"] == "timeout"
        assert done == "[DONE]"
    assert stand.wait_for(lambda: len(stand.engine.of(Abort)) == 2)
    assert not stand.client.open
    # Counted when the answer is out, which its client may see first.
    assert stand.wait_for(lambda: outcome(stand, "timeout") == 2)


def test_a_client_that_stops_reading_is_cut_off(make_stand: MakeStand) -> None:
    stand = make_stand(settings={"server.write_timeout": 0.5}, max_model_len=10**6)
    stand.engine.script = endless
    body = json.dumps({"model": "tiny", "prompt": "hi", "stream": True, "max_tokens": 900000})
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((stand.url.split("/")[2].split(":")[0], int(stand.url.rsplit(":", 1)[1])))
        client.sendall(request(body.encode()))
        assert stand.wait_for(lambda: stand.client.open)
        assert stand.wait_for(lambda: not stand.client.open, 20)
        assert stand.wait_for(lambda: outcome(stand, "timeout") == 1)
    assert stand.wait_for(lambda: len(stand.engine.of(Abort)) == 1)
    assert outcome(stand, "cancelled") == 0
    stand.engine.script = say("Hello!")
    assert stand.complete().status_code == 200


def test_a_client_that_reads_slowly_but_reads_is_served(make_stand: MakeStand) -> None:
    stand = make_stand(settings={"server.write_timeout": 0.5}, max_model_len=10**6)
    stand.engine.script = say("x" * 3000)
    body = {"model": "tiny", "prompt": "hi", "stream": True, "max_tokens": 3001}
    chunks = []
    with stand.http.stream("POST", "/v1/completions", json=body) as response:
        for number, line in enumerate(response.iter_lines()):
            chunks.append(line)
            if number % 1500 == 0:
                time.sleep(0.3)
    assert "data: [DONE]" in chunks
    assert outcome(stand, "ok") == 1


def test_what_waits_for_a_reader_is_bounded(
    make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "MAX_UNREAD", 50)
    stand = make_stand()
    stand.engine.script = silent
    stopped = threading.Event()

    def hold_up() -> None:
        """Outputs arrive, and the answer does not get its turn."""
        (sequence,) = stand.client.open.values()
        for _ in range(60):
            sequence.take(Output(sequence.submit.request_id, [97]))
            if not stand.client.open:
                stopped.set()
                return

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stand.complete, stream=True)
        assert stand.wait_for(lambda: stand.client.open)
        stand.on_loop(hold_up)
        assert stopped.is_set()
        *_, last, _ = sse(answer.result(20).text)
    assert json.loads(last)["error"]["code"] == "slow_reader"
    assert outcome(stand, "timeout") == 1


SECRET = "my password is swordfish"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": SECRET}),
        ("/v1/chat/completions", {"messages": [SECRET]}),
        ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"text": SECRET}}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [SECRET]}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x", "name": [SECRET]}]},
        ),
        ("/v1/chat/completions", {"messages": [], "chat_template_kwargs": SECRET}),
        ("/v1/completions", {"prompt": {"text": SECRET}}),
        ("/v1/completions", {"prompt": [SECRET, 1]}),
        ("/v1/completions", {"prompt": SECRET + "\0"}),
        ("/v1/completions", {"prompt": SECRET * 100}),
        ("/v1/completions", {"prompt": "x", "stop": [SECRET * 100]}),
        ("/v1/completions", {"prompt": "x", "cache_salt": SECRET * 100}),
        ("/v1/completions", {"prompt": SECRET, "temperature": 9}),
        ("/tokenize", {"prompt": [SECRET]}),
        ("/detokenize", {"tokens": SECRET}),
        ("/detokenize", {"tokens": [SECRET]}),
    ],
)
def test_errors_and_logs_repeat_nothing_private(
    stand: Stand, caplog: pytest.LogCaptureFixture, path: str, body: dict
) -> None:
    response = stand.http.post(path, json={"model": "tiny", **body})
    assert response.status_code == 400
    assert "swordfish" not in response.text
    assert "swordfish" not in caplog.text
    assert "swordfish" not in stand.http.get("/metrics").text


def test_a_method_that_is_not_allowed_is_told_which_are(stand: Stand) -> None:
    response = stand.http.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
