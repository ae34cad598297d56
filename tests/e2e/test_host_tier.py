"""The host tier through a real daemon: pressure of many times the pool, and what comes back."""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import demo
import pytest
from kills import Stream
from served import Daemon, serving
from tiny import write_model

pytestmark = pytest.mark.slow

REQUESTS = 64
MAX_TOKENS = 32
Texts = list[list[int]]
POOL = ("memory.page_tokens=16", "memory.limit=1024 tokens", "memory.host.limit=1GB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", num_layers=2)


def prompts() -> list[list[int]]:
    """64 prompts, eight for each of eight stems; with their outputs 20 times the pool."""
    rng = random.Random(2)
    stems = [rng.choices(range(256), k=230) for _ in range(8)]
    return [stems[index % 8] + rng.choices(range(256), k=60) for index in range(REQUESTS)]


def run_all(daemon: Daemon, leaves_after: Callable[[int], int | None] = lambda _: None) -> Texts:
    """Send all prompts at once; some clients leave after so many tokens."""

    def run(index: int) -> list[int]:
        body = {
            "model": "tiny",
            "prompt": prompts()[index],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        stream = Stream(leaves_after=leaves_after(index))
        stream.read(daemon.url, body)
        assert stream.error is None
        return stream.token_ids

    with ThreadPoolExecutor(REQUESTS) as threads:
        return list(threads.map(run, range(REQUESTS)))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """The texts of a pool in which all have room."""
    large = "memory.limit=65536 tokens"
    with serving(tmp_path_factory.mktemp("large"), str(model), large) as daemon:
        return run_all(daemon)


def test_pressure_of_twenty_times_the_pool(model: Path, expected: Texts, tmp_path: Path) -> None:
    assert sum(map(len, prompts())) + MAX_TOKENS * REQUESTS > 20 * 1024
    with serving(tmp_path, str(model), *POOL) as daemon:
        assert run_all(daemon) == expected
        daemon.assert_idle()
        evicted = daemon.metric("memd_evicted_pages_total")
        assert evicted > 0
        assert daemon.metric("memd_transfers_total", path="d2h") > 0
        assert daemon.metric("memd_transfers_total", path="h2d") > 0
        assert daemon.metric("memd_prefetched_pages_total", outcome="used") > 0
        assert daemon.metric("memd_preemptions_total") > 0
        direct = daemon.metric("memd_direct_reclaimed_pages_total")
        assert direct < 0.05 * evicted, f"{direct} of {evicted} pages in a hurry"
        hits, misses, queries = (
            daemon.metric(f"memd_prefix_{name}_tokens_total") for name in ("hit", "miss", "query")
        )
        assert hits + misses == queries


def test_pressure_with_aborts_and_faults(model: Path, expected: Texts, tmp_path: Path) -> None:
    """Copies come late or fail, free pages hold NaN, clients leave: what is said is still right."""
    chance = random.Random(3)
    leaves_after = [chance.choice([None, None, None, 1, 5, 30]) for _ in range(REQUESTS)]
    plan = {
        "seed": 3,
        "delay_copies_seconds": 0.01,
        "fail_write_backs": 0.2,
        "fail_restores": 0.2,
        "nan_in_free_pages": True,
    }
    with serving(tmp_path, str(model), *POOL, "debug.faults=true") as daemon:
        assert daemon.http.put("/admin/v1/debug/faults", json=plan).status_code == 200
        texts = run_all(daemon, leaves_after.__getitem__)
        for text, whole, left_after in zip(texts, expected, leaves_after, strict=True):
            assert text == whole[: len(text)]
            assert len(text) >= (left_after or MAX_TOKENS)
        daemon.assert_idle()
        injected = daemon.http.get("/admin/v1/debug/faults").json()["injected"]
        for path in ("d2h", "h2d"):
            assert injected[path] > 0
            assert daemon.metric("memd_transfer_failures_total", path=path) == injected[path]
        assert daemon.metric("memd_preemptions_total") > 0
        daemon.post("/admin/v1/pool/flush", {})
        daemon.wait_until(
            lambda: daemon.metric("memd_pool_pages", state="free") == 64, 60, "all pages free"
        )


@pytest.fixture(scope="module")
def demo_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    settings = ("memory.limit=4096 tokens", "memory.host.limit=2GB", "model.dtype=float32")
    settings += ("engine.threads=auto",)
    with serving(tmp_path_factory.mktemp("demo"), demo.NAME, *settings) as daemon:
        yield daemon


@demo.needs_demo_model
def test_a_prefix_on_the_host_comes_back_faster_than_it_is_computed(demo_daemon: Daemon) -> None:
    prompt = random.Random(1).choices(range(100, 49_000), k=600)

    def first_token_seconds(host_tokens: int, cached_tokens: int) -> float:
        started = time.monotonic()
        answer = demo_daemon.complete(prompt, max_tokens=1)
        spent = time.monotonic() - started
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached_tokens
        assert usage["memd"]["cached_tokens_by_tier"]["host"] == host_tokens
        return spent

    cold = first_token_seconds(0, 0)
    demo_daemon.post("/admin/v1/pool/reclaim", {"pages": 256})
    demo_daemon.wait_until(
        lambda: demo_daemon.metric("memd_pool_pages", state="cached") == 0, 60, "all on the host"
    )
    computed = demo_daemon.metric("memd_prompt_tokens_total", source="computed")
    restored = first_token_seconds(592, 592)
    assert demo_daemon.metric("memd_prompt_tokens_total", source="computed") == computed + 8
    assert restored < cold / 3
