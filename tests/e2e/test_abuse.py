"""Clients that leave, shout and lie, against a real daemon with a tiny model."""

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle, pairwise
from pathlib import Path

import httpx2
import pytest
from http_stand import Stand, byte_tokenizer, say
from prometheus_client.parser import text_string_to_metric_families
from served import Daemon, serving
from tiny import write_model
from toy import Harness, ToyModel, continuation

from memd.config import build

pytestmark = pytest.mark.slow

PAGES = ("memory.page_tokens=16", "memory.limit=1024 tokens")
LEFT_IN = 1.0  # seconds in which everything of a client that left is gone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some milliseconds a step, so that a client can leave in the middle."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny", num_layers=12)


@pytest.fixture(scope="module")
def daemon(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """64 pages of 16 tokens."""
    with serving(tmp_path_factory.mktemp("state"), str(model), *PAGES) as served:
        yield served


def body_of(prompt: object = "hi", **more: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 800, "ignore_eos": True, **more}


@contextmanager
def asked(daemon: Daemon, headers: str = "", **body: object) -> Iterator[socket.socket]:
    """A connection on which a completion has been asked for; leaving the block cuts it."""
    text = json.dumps(body_of(**body))
    host, port = daemon.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"{headers}Content-Length: {len(text)}\r\n\r\n{text}".encode()
        )
        yield connection


def read_chunks(connection: socket.socket, count: int) -> bytes:
    """Read until so many events have come."""
    received = b""
    while received.count(b"data: ") < count:
        more = connection.recv(65536)
        assert more, received
        received += more
    return received


def stream(daemon: Daemon, **body: object) -> Iterator[tuple[float, str]]:
    """When each piece of a streamed completion came, and its text."""
    with daemon.http.stream("POST", "/v1/completions", json=body_of(stream=True, **body)) as got:
        for line in got.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                yield time.monotonic(), choices[0]["text"]


def idle(daemon: Daemon) -> bool:
    return daemon.metric("memd_requests_running") == 0 == daemon.metric("memd_requests_waiting")


def generated(daemon: Daemon) -> float:
    return daemon.metric("memd_generated_tokens_total")


def aborts(daemon: Daemon) -> float:
    return daemon.metric("memd_finished_sequences_total", reason="abort")


def generated_now(daemon: Daemon) -> int:
    """Of what is open, as its engine tells now."""
    open_requests = daemon.http.get("/admin/v1/requests").json()["requests"]
    return sum(row["generated_tokens"] for row in open_requests)


def test_clients_that_leave(daemon: Daemon) -> None:
    """Case C001. A few of the cuts may come through late on a machine that others keep busy."""
    aborted_before, after_cut = aborts(daemon), []
    for index in range(50):
        before, cut_streams = generated(daemon), index % 2 == 0
        with asked(daemon, prompt=[index + 1] * 20, stream=cut_streams) as connection:
            if cut_streams:
                read_chunks(connection, 3)
            else:
                time.sleep(0.2)
            at_cut = generated_now(daemon)
        daemon.wait_until(lambda: idle(daemon), LEFT_IN, "nothing runs")
        told = generated(daemon) - before
        assert told < 800, "it was over before the cut"
        after_cut.append(told - at_cut)
    assert sorted(after_cut)[45 - 1] <= 10
    assert max(after_cut) < 400
    daemon.assert_idle(LEFT_IN)
    assert aborts(daemon) == aborted_before + 50


def test_a_queue_whose_clients_have_left(model: Path, tmp_path: Path) -> None:
    """Case C004."""
    with serving(tmp_path, str(model), *PAGES, "engine.max_sequences=1") as daemon:
        computed = daemon.metric("memd_prompt_tokens_total", source="computed")
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(daemon.complete, [1] * 30, max_tokens=400, ignore_eos=True)
            daemon.wait_until(
                lambda: daemon.metric("memd_requests_running") == 1, 60, "the first runs"
            )
            waiting = [asked(daemon, prompt=[9 + index] * 40) for index in range(20)]
            for each in waiting:
                each.__enter__()
            daemon.wait_until(
                lambda: daemon.metric("memd_requests_waiting") == 20, 60, "twenty wait"
            )
            for each in waiting:
                each.__exit__(None, None, None)
            daemon.wait_until(
                lambda: daemon.metric("memd_requests_waiting") == 0, LEFT_IN, "none waits"
            )
            assert not first.done()
            last = daemon.complete([2] * 50, max_tokens=1)
        assert first.result()["usage"]["completion_tokens"] == 400
        assert last["usage"]["completion_tokens"] == 1
        now = daemon.metric("memd_prompt_tokens_total", source="computed")
        assert now - computed == 30 + 50
        assert aborts(daemon) == 20
        daemon.assert_idle()


def test_one_id_for_two_requests(daemon: Daemon) -> None:
    """Case C089."""
    alone = "".join(text for _, text in stream(daemon, max_tokens=200, temperature=0))
    headers = {"x-request-id": "the-same"}
    body = body_of(stream=True, max_tokens=200, temperature=0, request_id="the-same")
    with daemon.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.headers["x-request-id"] == "the-same"
        lines = response.iter_lines()
        told = [next(lines)]
        with asked(
            daemon,
            "X-Request-Id: the-same\r\n",
            prompt="other",
            stream=True,
            request_id="the-same",
        ) as second:
            assert b"x-request-id: the-same" in read_chunks(second, 3)
        told += lines
    events = [json.loads(line[6:]) for line in told if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == alone
    daemon.wait_until(lambda: idle(daemon), LEFT_IN, "nothing runs")
    assert daemon.metric("memd_requests_running") == 0
    daemon.assert_idle(LEFT_IN)


def test_fifty_streams_cut_at_once(daemon: Daemon) -> None:
    """Case C110."""
    streams = [asked(daemon, prompt=[index + 3] * 20, stream=True) for index in range(50)]
    for each in streams:
        each.__enter__()
    daemon.wait_until(lambda: daemon.metric("memd_requests_running") > 20, 60, "they run")
    for each in streams:
        each.__exit__(None, None, None)
    time.sleep(2)
    assert daemon.metric("memd_requests_running") == 0
    assert daemon.metric("memd_requests_waiting") == 0
    assert daemon.metric("memd_pool_pages", state="active") == 0
    assert daemon.metric("memd_pool_active_ratio") == 0
    daemon.assert_idle()


def test_series_do_not_grow_with_what_clients_write(daemon: Daemon) -> None:
    """Case C114."""
    chance = random.Random(114)

    def word() -> str:
        return f"{chance.randbytes(6).hex()}"

    def series() -> int:
        lines = daemon.http.get("/metrics").text.splitlines()
        return sum(not line.startswith("#") for line in lines)

    daemon.complete("hi", max_tokens=1, user="known")
    daemon.http.get("/nothing")
    before = series()
    with ThreadPoolExecutor(4) as threads:

        def unknown_model(name: str) -> int:
            return daemon.post("/v1/completions", body_of(model=name)).status_code

        def unknown_path(path: str) -> int:
            return daemon.http.get(path).status_code

        def known(user: str) -> int:
            body = body_of(max_tokens=1, user=user)
            return daemon.post("/v1/completions", body).status_code

        assert set(threads.map(unknown_model, [word() for _ in range(1000)])) == {404}
        paths = [f"{chance.choice(('', '/v1', '/admin/v1'))}/{word()}" for _ in range(200)]
        assert set(threads.map(unknown_path, paths)) == {404}
        assert set(threads.map(known, [word() for _ in range(200)])) == {200}
    assert series() <= before + 3
    daemon.assert_idle()


def stalls_during(daemon: Daemon, posts: list[tuple[str, bytes]]) -> tuple[list[int], float, float]:
    """Post bodies while others poll and read a stream.

    Returns:
        The statuses, the 99th percentile of a poll and the longest time between tokens, seconds.
    """
    polled, times, done = [], [], threading.Event()

    def poll() -> None:
        with httpx2.Client(base_url=daemon.url, timeout=60) as http:
            while not done.wait(0.1):
                started_at = time.monotonic()
                assert http.get("/health/ready").status_code == 200
                polled.append(time.monotonic() - started_at)

    def read() -> None:
        times.extend(at for at, _ in stream(daemon, max_tokens=900))

    threads = [threading.Thread(target=target) for target in (poll, read)]
    for thread in threads:
        thread.start()
    daemon.wait_until(lambda: len(times) > 3, 60, "the stream has begun")
    statuses = []
    with httpx2.Client(base_url=daemon.url, timeout=60) as http:
        for path, content in posts:
            try:
                statuses.append(http.post(path, content=content).status_code)
            except httpx2.WriteError:  # hung up on while it was still sending
                statuses.append(413)
    threads[1].join()
    done.set()
    threads[0].join()
    gap = max(after - at for at, after in pairwise(times))
    return statuses, sorted(polled)[int(len(polled) * 0.99)], gap


def test_a_huge_body_stalls_nobody(daemon: Daemon) -> None:
    """Case C120. What memd does stalls every time; a machine that others starve, some times."""
    huge = json.dumps(body_of("word " * (4 * 2**20))).encode()
    assert len(huge) > 20 * 2**20
    no_messages = b'{"model": "tiny", "messages": [%s0]}' % (b"0," * (7 * 2**19))
    posts = [
        ("/v1/completions", huge),
        ("/v1/completions", huge[: 7 * 2**20] + b'"}'),
        ("/v1/chat/completions", no_messages),
    ]
    for _ in range(3):
        statuses, poll, gap = stalls_during(daemon, posts)
        assert statuses == [413, 400, 400]
        if poll < 0.25 and gap < 0.5:
            break
    assert poll < 0.25
    assert gap < 0.5
    daemon.assert_idle()


def test_readiness_is_true_when_it_serves(model: Path, tmp_path: Path) -> None:
    """Case C122."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    seen: list[tuple[int, int]] = []

    def watch() -> None:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and (not seen or seen[-1][0] != 200):
                try:
                    ready = http.get("/health/ready").status_code
                    answer = http.post("/v1/completions", json=body_of(max_tokens=1))
                except httpx2.TransportError:
                    time.sleep(0.02)
                    continue
                if answer.status_code == 503:
                    assert int(answer.headers["retry-after"]) > 0
                seen.append((ready, answer.status_code))

    with ThreadPoolExecutor(1) as threads:
        watching = threads.submit(watch)
        with serving(tmp_path, str(model), *PAGES, port=port):
            watching.result()
    assert seen[0] == (503, 503)
    assert seen[-1] == (200, 200)
    assert all(completion == 200 for ready, completion in seen if ready == 200)
    assert {completion for _, completion in seen} == {200, 503}


def test_steps_of_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case C118: the HTTP side measures intervals by the monotonic clock only."""
    real, steps = time.time, cycle((0, -3600, 3600))
    monkeypatch.setattr(time, "time", lambda: real() + next(steps))
    with Stand(tmp_path, build({}), byte_tokenizer(), 200, 64, True) as stand:
        stand.engine.script = say("Hello!", pause=0.01)
        for stream in (False, True, False):
            assert stand.complete(stream=stream).status_code == 200
        for revision in (1, 2, 3):
            body = {"revision": revision, "reason": "test", "changes": {}}
            body["changes"] = {"memory.watermark.high": 0.9 - revision / 100}
            assert stand.http.patch("/admin/v1/settings", json=body).status_code == 200
        history = stand.http.get("/admin/v1/settings/history").json()["history"]
        revisions = [row["revision"] for row in history]
        assert revisions == sorted(revisions)
        families = text_string_to_metric_families(stand.http.get("/metrics").text)
        sums = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name.endswith("_seconds_sum")
        ]
    assert max(sums) > 0.1
    assert all(0 <= value < 60 for value in sums)


def test_steps_of_the_engines_clock() -> None:
    """Case C118: whatever the clock tells, texts are right and nothing raises or is held."""

    class Stepping(ToyModel):
        steps = cycle((-3600.0, 3600.0, 3600.0, -3600.0))

        def forward(self, *arguments: object) -> object:
            if clock:
                clock[0].time += next(self.steps)
            return super().forward(*arguments)  # type: ignore[arg-type]

    clock: list[Harness] = []
    harness = Harness(model=Stepping())
    clock.append(harness)
    prompts = [[index] * 30 for index in range(40)]
    names = [harness.submit(prompt, 40) for prompt in prompts]
    harness.finish()
    for name, prompt in zip(names, prompts, strict=True):
        assert harness.tokens(name) == continuation(prompt, 40)
    assert harness.engine.snapshot().pool.evicted_pages["watermark"] > 0
    harness.assert_idle()
