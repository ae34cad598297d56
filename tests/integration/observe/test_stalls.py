"""Waits for memory under the inline engine: each has one cause, and they add up."""

import random

import toy
from toy import Harness

from memd.engine.messages import PoolCommand
from memd.faults import FaultPlan


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(toy.VOCAB - 1), k=length)


def stalls(harness: Harness) -> dict[str, int]:
    """Ended stalls by cause."""
    seconds = harness.engine.snapshot().stall_seconds
    return {cause: sum(counted.counts) for cause, counted in seconds.items()}


def test_a_request_that_finds_no_room_waits_for_an_allocation() -> None:
    harness = Harness()
    harness.submit(prompt(700, seed=1), 100, ignore_eos=True)
    harness.step(2)
    second = harness.submit(prompt(600, seed=2), 4)
    harness.step(2)
    began = harness.time
    harness.finish()
    assert stalls(harness) == {"allocation": 1, "transfer": 0, "preempted": 0}
    waited = harness.engine.snapshot().stall_seconds["allocation"].total
    first_output = next(each for each in harness.outputs[second] if each.queue_seconds is not None)
    assert 0 < waited <= first_output.queue_seconds
    assert waited < harness.time - began + 0.01


def test_a_request_whose_pages_are_on_the_host_waits_for_a_transfer() -> None:
    late = FaultPlan(nan_in_free_pages=True, delay_copies_seconds=0.02)
    harness = Harness("memory.host.limit=1GB", faults=late)
    harness.generate(prompt(320), 4)
    harness.ask(PoolCommand(99, "reclaim", 64))
    harness.finish()
    harness.submit([*prompt(320), 1, 2], 4)
    harness.finish()
    assert stalls(harness) == {"allocation": 0, "transfer": 1, "preempted": 0}
    snapshot = harness.engine.snapshot()
    assert snapshot.stall_seconds["transfer"].total >= 0.02
    copies = snapshot.pool.transfer_seconds
    assert {path: sum(counted.counts) for path, counted in copies.items()} == {
        path: sum(outcomes.values()) for path, outcomes in snapshot.pool.transfers.items()
    }
    assert copies["h2d"].total >= 20 * 0.02  # each of the pages was that late


def test_a_preempted_request_waits_for_nothing_else_until_it_goes_on() -> None:
    harness = Harness("engine.reserve_tokens=16")
    for index in range(24):
        harness.submit(prompt(40 + 9 * index, seed=index), 120, ignore_eos=True)
    harness.finish()
    assert harness.engine.snapshot().preemptions == stalls(harness)["preempted"] > 0


def test_steps_on_a_cpu_are_eager() -> None:
    harness = Harness()
    harness.generate(prompt(20), 8)
    snapshot = harness.engine.snapshot()
    assert sum(snapshot.steps.values()) == 8
    assert snapshot.replayed_steps == {"prefill": 0, "decode": 0, "mixed": 0}
    assert snapshot.allocator_bytes is None
    assert harness.ready.gpu is None
