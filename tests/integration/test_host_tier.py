"""The host tier under the inline engine: what leaves comes back, and no text changes."""

import random
from array import array

import pytest
import toy
from paces import both_paces  # noqa: F401
from toy import Harness, continuation

from memd.engine.messages import Abort, ApplySettings, PoolCommand
from memd.engine.request import Request
from memd.faults import FaultPlan
from memd.pool.sequence import PrefixMatch
from memd.types import TransferId

HOST = "memory.host.limit=1GB"


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(toy.VOCAB - 1), k=length)


def late(seconds: float, **more: float) -> FaultPlan:
    """Copies begin late, in a harness that takes half a millisecond or more for a step."""
    return FaultPlan(nan_in_free_pages=True, delay_copies_seconds=seconds, **more)


def push_out(harness: Harness) -> None:
    """Evict everything from the device to the host."""
    harness.ask(PoolCommand(99, "reclaim", 64))
    harness.finish()


def test_a_prefix_on_the_host_is_restored_and_not_computed_again() -> None:
    harness = Harness(HOST)
    harness.generate(prompt(320), 4)
    push_out(harness)
    assert harness.engine.pool.pages.cached == 0
    computed = harness.model.computed_tokens
    request_id = harness.submit([*prompt(320), 1, 2, 3], 10)
    harness.finish()
    assert harness.tokens(request_id) == continuation([*prompt(320), 1, 2, 3], 10)
    assert harness.cached(request_id) == 320
    assert harness.outputs[request_id][0].restored_tokens == {"host": 320}
    assert harness.model.computed_tokens - computed == 3 + 9
    snapshot = harness.engine.snapshot()
    assert snapshot.pool.prefix_hit_tokens == {"device": 0, "host": 320, "disk": 0}
    assert snapshot.pool.prefetched_pages["used"] == 20
    assert snapshot.pool.transfers["h2d"]["ok"] == 20
    assert snapshot.prompt_tokens["host"] == 320
    harness.assert_idle()


@pytest.mark.parametrize("delay_seconds", [0, 0.001, 0.01, 0.1])
def test_late_copies_change_nothing(delay_seconds: float) -> None:
    harness = Harness(HOST, faults=late(delay_seconds))
    for seed in range(4):
        harness.generate(prompt(200, seed), 8)
    push_out(harness)
    ids = [harness.submit(prompt(200, seed), 20) for seed in range(4)]
    harness.finish()
    for seed, request_id in enumerate(ids):
        assert harness.tokens(request_id) == continuation(prompt(200, seed), 20)
    harness.assert_idle()


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param({"fail_restores": 1.0}, id="all restores"),
        pytest.param({"fail_write_backs": 1.0}, id="all write-backs"),
        pytest.param({"fail_restores": 0.3, "fail_write_backs": 0.3}, id="a third"),
    ],
)
def test_failed_copies_are_misses(shares: dict[str, float]) -> None:
    harness = Harness(HOST, faults=late(0.002, **shares))
    for _ in range(3):
        ids = {seed: harness.submit(prompt(200, seed), 20) for seed in range(6)}
        harness.finish()
        for seed, request_id in ids.items():
            assert harness.tokens(request_id) == continuation(prompt(200, seed), 20)
        push_out(harness)
    failed = harness.engine.snapshot().pool.transfers
    assert failed["h2d"]["failed"] + failed["d2h"]["failed"] > 0
    harness.assert_idle()


def test_copies_that_take_too_long_are_not_waited_for() -> None:
    harness = Harness(HOST, "memory.prefetch.timeout=200ms", faults=late(0.004))
    harness.generate(prompt(320), 4)
    push_out(harness)
    harness.arm(delay_copies_seconds=1e6)
    started = harness.time
    request_id = harness.submit(prompt(320), 4)
    while harness.outputs.get(request_id) is None:
        harness.step()
        harness.time += 0.01
    assert harness.time - started < 0.4
    assert harness.cached(request_id) == 0
    while harness.end_of(request_id) is None:
        harness.step()
    assert harness.tokens(request_id) == continuation(prompt(320), 4)


def test_pressure_far_beyond_the_device() -> None:
    """KV of 20 times the pool passes through it; nearly nothing is evicted in a hurry."""
    harness = Harness(HOST, "engine.max_batch_tokens=256", faults=late(0.001))
    rng = random.Random(4)
    stems = [prompt(160, seed) for seed in range(40)]
    expected = {}
    for _ in range(160):
        text = rng.choice(stems) + prompt(rng.randrange(1, 60), rng.randrange(10**6))
        expected[harness.submit(text, 24)] = continuation(text, 24)
        harness.step(3)
    harness.finish()
    for request_id, tokens in expected.items():
        assert harness.tokens(request_id) == tokens
    pool = harness.engine.snapshot().pool
    assert pool.transfers["d2h"]["ok"] > 0
    assert pool.prefetched_pages["used"] > 0
    assert pool.offloaded_pages["watermark"] > 0
    assert pool.prefix_hit_tokens["host"] > 0
    harness.assert_idle()


def test_random_traffic_with_aborts_and_faults() -> None:
    rng = random.Random(9)
    plan = late(0.002, fail_restores=0.2, fail_write_backs=0.2)
    harness = Harness(HOST, "memory.limit=512 tokens", faults=plan)
    expected: dict[str, list[int]] = {}
    for number in range(250):
        if rng.random() < 0.5:
            text = prompt(rng.choice([30, 90, 150]), rng.randrange(6)) + prompt(
                rng.randrange(1, 9), rng.randrange(50)
            )
            count = rng.randrange(1, 30)
            expected[harness.submit(text, count)] = continuation(text, count)
        if rng.random() < 0.1 and expected:
            harness.send(Abort(rng.choice(list(expected))))
        if rng.random() < 0.05:
            harness.send(PoolCommand(1000 + number, rng.choice(["flush", "audit"])))
        if rng.random() < 0.05:
            limit = {"memory.host.limit": rng.choice([0, 2048, 10**6])}
            harness.send(ApplySettings(number, number, limit))
        harness.arm(delay_copies_seconds=rng.randrange(6) / 1000, seed=number)
        harness.step(rng.randrange(4))
    harness.finish()
    for request_id, tokens in expected.items():
        got = harness.tokens(request_id)
        assert got == tokens[: len(got)]
        assert harness.end(request_id).finish_reason in ("length", "abort")
    harness.assert_idle()


def test_eight_prompts_that_are_all_on_the_host_start_one_after_another() -> None:
    """Restores for some never keep all from starting (case C051)."""
    harness = Harness(HOST, faults=late(0.002))
    for seed in range(8):
        harness.generate(prompt(480, seed), 1)
        push_out(harness)
    ids = [harness.submit(prompt(480, seed), 40) for seed in range(8)]
    harness.finish(limit=3000)
    for seed, request_id in enumerate(ids):
        assert harness.tokens(request_id) == continuation(prompt(480, seed), 40)
    assert harness.engine.snapshot().pool.prefix_hit_tokens["host"] >= 4 * 464
    harness.assert_idle()


def test_pages_of_a_queue_are_there_before_its_turns() -> None:
    harness = Harness(HOST, "engine.max_sequences=2", "memory.limit=1024 tokens")
    for seed in range(8):
        harness.generate(prompt(112, seed), 4)
    push_out(harness)
    missing: dict[str, int] = {}
    prefetcher = harness.engine.scheduler._prefetcher
    bring_up = prefetcher.bring_up

    def noted(request: Request, match: PrefixMatch) -> bool:
        missing.setdefault(request.id, len(match.missing))
        return bring_up(request, match)

    prefetcher.bring_up = noted  # type: ignore[method-assign]
    ids = [harness.submit(prompt(112, seed), 40) for seed in range(8)]
    harness.finish()
    for seed, request_id in enumerate(ids):
        assert harness.tokens(request_id) == continuation(prompt(112, seed), 40)
        assert harness.cached(request_id) == 112 - 1 or harness.cached(request_id) == 96
    assert set(missing) <= set(ids[:2])  # nothing could be there for those that began at once
    prefetched = harness.engine.pool.counters.prefetched
    assert prefetched["wasted"] == 0
    assert prefetched["used"] >= 6 * 6
    harness.assert_idle()


def test_reports_of_unknown_copies_are_counted_and_ignored() -> None:
    """Case C006: of an id that never was; again, with another end, of each copy of either way."""
    harness = Harness(HOST)
    pool, reported = harness.engine.pool, []
    finish_transfer = pool.finish_transfer

    def recorded(transfer_id: TransferId, ok: bool) -> None:
        reported.append(transfer_id)
        finish_transfer(transfer_id, ok)

    pool.finish_transfer = recorded  # type: ignore[method-assign]
    text = prompt(100)
    harness.generate(text, 4)
    push_out(harness)
    assert harness.generate(text, 4) == continuation(text, 4)
    transfers = harness.engine.snapshot().pool.transfers
    assert transfers["d2h"]["ok"] > 0
    assert transfers["h2d"]["ok"] > 0
    for transfer_id in (TransferId(12345), *reported):
        finish_transfer(transfer_id, True)
        finish_transfer(transfer_id, False)
    assert harness.engine.snapshot().pool.late_transfers == 2 * (1 + len(reported))
    assert harness.engine.snapshot().pool.transfers == transfers
    assert harness.generate(text, 4) == continuation(text, 4)
    harness.assert_idle()


def test_a_restore_that_ends_after_its_request_is_gone() -> None:
    """Case C006: the request is aborted and its prefix flushed while the copies are under way."""
    harness = Harness(HOST, faults=late(0.05))
    text = prompt(320)
    harness.generate(text, 4)
    push_out(harness)
    request_id = harness.submit(text, 4)
    while not harness.engine.snapshot().pool.transfers_under_way["h2d"]:
        harness.step()
    harness.send(Abort(request_id), PoolCommand(1, "flush"))
    harness.finish()
    assert harness.end_of(request_id) == "abort"
    harness.time += 1.0
    harness.step(5)
    harness.assert_idle()
    assert harness.generate(text, 4) == continuation(text, 4)
    harness.assert_idle()


def test_device_hits_pin_nothing_on_the_host() -> None:
    """Case C008: the host tier stays evictable however often its pages are found on the device."""
    harness = Harness(f"memory.host.limit={64 * 256}B")
    for _ in range(20):
        harness.generate(prompt(512), 1)
    assert harness.engine.snapshot().pool.host_pinned_pages == 0
    for seed in range(1, 12):
        harness.generate(prompt(512, seed), 1)
        push_out(harness)
    pool = harness.engine.snapshot().pool
    assert pool.host_pinned_pages == 0
    assert pool.host_evicted_pages > 0
    assert pool.host_used_pages <= 64


def test_probes_renew_nothing() -> None:
    """Case C022: looking everything up all the time leaves the evictor its victims."""
    harness = Harness(HOST, faults=late(0.001))
    texts = [prompt(200, seed) for seed in range(16)]
    harness.generate(texts[0], 4)
    (namespace,) = harness.engine.pool.tree.namespaces()
    for text in texts:
        harness.generate(text, 4)
        for other in texts:
            harness.engine.pool.match(array("i", other), namespace)
    snapshot = harness.engine.snapshot()
    assert snapshot.pool.allocations["failed"] == 0
    assert snapshot.pool.host_pinned_pages == 0
    harness.assert_idle()


def test_the_host_limit_is_live() -> None:
    harness = Harness(HOST)
    for seed in range(3):
        harness.generate(prompt(300, seed), 4)
        push_out(harness)
    assert harness.engine.snapshot().pool.host_used_pages > 40
    harness.ask(ApplySettings(1, 2, {"memory.host.limit": 10 * 256}))
    assert harness.engine.snapshot().pool.host_used_pages <= 10
    harness.ask(ApplySettings(2, 3, {"memory.host.limit": "auto"}))
    assert harness.engine.snapshot().pool.host_used_pages == 0
    harness.assert_idle()
