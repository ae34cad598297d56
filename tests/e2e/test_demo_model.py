"""The demo model through a real daemon: sharing, pressure, live tuning, clients that leave."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import demo
import openai
import pytest
from served import Daemon, serving

pytestmark = [demo.needs_demo_model, pytest.mark.slow]

VOCABULARY = 49_000
PRESSED = 10


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(100, VOCABULARY), k=length)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """64 pages of 16 tokens."""
    settings = ("memory.page_tokens=16", "memory.limit=1024 tokens", "model.dtype=float32")
    with serving(tmp_path_factory.mktemp("small"), demo.NAME, *settings) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def large_texts(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the pressed requests give with all the memory they want."""
    settings = ("memory.limit=65536 tokens", "model.dtype=float32")
    with serving(tmp_path_factory.mktemp("large"), demo.NAME, *settings) as daemon:
        return pressed(daemon)


def pressed(daemon: Daemon) -> list[list[int]]:
    """10 requests at once, more than 1,024 tokens in all."""

    def run(index: int) -> list[int]:
        answer = daemon.complete(
            prompt(60 + 7 * index, index), max_tokens=44, ignore_eos=True, return_token_ids=True
        )
        return list(answer["choices"][0]["token_ids"])

    with ThreadPoolExecutor(PRESSED) as threads:
        return list(threads.map(run, range(PRESSED)))


def test_a_repeated_prompt_reports_its_cached_tokens(small: Daemon) -> None:
    small.post("/admin/v1/pool/flush", {})
    texts = []
    for cached in (0, 191):
        answer = small.complete(prompt(192), max_tokens=8)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        texts.append(answer["choices"][0]["text"])
    assert texts[0] == texts[1]
    other = prompt(192)[:120] + prompt(60, 9)
    answer = small.complete(other, max_tokens=8)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 120
    small.post("/admin/v1/pool/flush", {})
    cold = small.complete(other, max_tokens=8)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold["choices"][0]["text"] == answer["choices"][0]["text"]


def test_salts_share_nothing(small: Daemon) -> None:
    small.post("/admin/v1/pool/flush", {})
    for salt, cached in (("s1", 0), ("s1", 99), ("s2", 0), (None, 0)):
        answer = small.complete(prompt(100), max_tokens=1, cache_salt=salt)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_a_small_pool_gives_the_texts_of_a_large_one(
    small: Daemon, large_texts: list[list[int]]
) -> None:
    before = small.metric("memd_preemptions_total"), small.metric("memd_evicted_pages_total")
    assert pressed(small) == large_texts
    assert small.metric("memd_preemptions_total") > before[0]
    assert small.metric("memd_evicted_pages_total") > before[1]
    small.assert_idle()


def test_watermarks_are_tuned_under_load(small: Daemon) -> None:
    done = threading.Event()

    def load(index: int) -> int:
        finished = 0
        while not done.is_set():
            small.complete(prompt(150, index * 1000 + finished), max_tokens=8)
            finished += 1
        return finished

    occupied = "memd_pool_occupied_ratio"
    with ThreadPoolExecutor(3) as threads:
        loads = [threads.submit(load, index) for index in range(3)]
        try:
            small.wait_until(lambda: small.metric(occupied) > 0.65, 60, "the pool fills")
            changes = {"memory__watermark__high": "60%", "memory__watermark__low": "40%"}
            assert small.settings(**changes).status_code == 200
            assert small.metric("memd_pool_watermark_ratio", level="high") == 0.6
            assert small.metric("memd_pool_watermark_ratio", level="low") == 0.4
            small.wait_until(lambda: small.metric(occupied) < 0.6, 2, "occupied under the mark")
        finally:
            done.set()
        assert all(each.result() > 0 for each in loads)
    undone = small.post("/admin/v1/settings/undo", {"reason": "enough"})
    assert undone.status_code == 200
    assert small.metric("memd_pool_watermark_ratio", level="high") == 0.9
    small.assert_idle()


@pytest.mark.parametrize(
    ("high", "low"),
    [
        ("80%", "90%"),
        ("90%", "90%"),
        (1.2, 0.5),
        (0.9, -0.1),
        ("0.9", "70%"),
        (0.9, 0),
        ("", "70%"),
    ],
)
def test_marks_that_make_no_sense_are_refused(small: Daemon, high: object, low: object) -> None:
    """Case C020."""
    settings = small.http.get("/admin/v1/settings").json()
    changes = {"memory.watermark.high": high, "memory.watermark.low": low}
    body = {"revision": settings["revision"], "reason": "test", "changes": changes}
    response = small.http.patch("/admin/v1/settings", json=body)
    assert response.status_code == 400
    assert "memory.watermark" in response.json()["error"]["message"]
    assert small.http.get("/admin/v1/settings").json() == settings


def test_a_stale_revision_is_refused(small: Daemon) -> None:
    body = {"revision": 0, "reason": "test", "changes": {"memory.watermark.high": "80%"}}
    response = small.http.patch("/admin/v1/settings", json=body)
    assert response.status_code == 409


def test_clients_that_leave_free_their_pages(small: Daemon) -> None:
    """Streaming and not; within a second nothing is held (the start of case C001)."""
    body = (
        '{"model": "%s", "prompt": "Once upon a time", "max_tokens": 800, "ignore_eos": true,'
        ' "stream": %s}'
    )
    host, port = small.url.removeprefix("http://").split(":")
    aborts = small.metric("memd_finished_sequences_total", reason="abort")
    for stream in ("true", "false"):
        text = body % (demo.NAME, stream)
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json"
                f"\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
            )
            small.wait_until(lambda: small.metric("memd_requests_running") == 1, 60, "it runs")
            time.sleep(0.2)
        small.assert_idle(1.0)
    assert small.metric("memd_finished_sequences_total", reason="abort") == aborts + 2


def test_the_openai_client(small: Daemon) -> None:
    client = openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(
        model=demo.NAME,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=20,
        logprobs=True,
        top_logprobs=2,
    )
    text = whole.choices[0].message.content
    assert text == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"
    pieces = client.chat.completions.create(
        model=demo.NAME,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    streamed, usage = "", None
    for chunk in pieces:
        usage = chunk.usage or usage
        streamed += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    assert streamed == text
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]
    seeded = [
        client.completions.create(
            model=demo.NAME, prompt="The sea", seed=11, max_tokens=12, n=3, temperature=1
        )
        for _ in range(2)
    ]
    texts = [[choice.text for choice in each.choices] for each in seeded]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    assert seeded[0].usage.completion_tokens == 36  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=demo.NAME, prompt="x", temperature=3)


def test_a_prompt_larger_than_the_pool_blocks_nobody(small: Daemon) -> None:
    """Case C012."""
    body = {"model": demo.NAME, "prompt": prompt(1100), "max_tokens": 16}
    started = time.monotonic()
    response = small.post("/v1/completions", body)
    assert time.monotonic() - started < 1
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "69 pages" in response.json()["error"]["message"]
    assert "64" in response.json()["error"]["message"]
    started = time.monotonic()
    small.complete(prompt(10), max_tokens=5)
    assert time.monotonic() - started < 2


def test_the_log_holds_no_prompt(small: Daemon, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = "xylophone-quasar"
    small.complete(f"My secret is {secret}", max_tokens=2)
    small.post("/v1/completions", {"model": demo.NAME, "prompt": secret, "max_tokens": "no"})
    for log in Path(tmp_path_factory.getbasetemp()).glob("small*/log"):
        assert secret not in log.read_text()
    assert secret not in small.http.get("/metrics").text
