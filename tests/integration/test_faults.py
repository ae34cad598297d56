"""Faults on demand under the inline engine: each hits what it names and nothing else."""

import random

import torch
import toy
from toy import Harness, ToyModel, continuation

from memd.engine.messages import ArmFaults, PoolCommand
from memd.faults import FaultPlan
from memd.models.decoder import ForwardBatch


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(toy.VOCAB - 1), k=length)


class SpyingModel(ToyModel):
    """Counts the places of the first block that hold a number before each pass."""

    numbers_seen = 0

    def forward(self, batch: ForwardBatch, kv: torch.Tensor, packed: None = None) -> torch.Tensor:
        self.numbers_seen = int(kv[0, :, 0, 0, 0, :, 0].isfinite().sum())
        return super().forward(batch, kv, packed)


def test_a_block_without_memory_is_waited_for() -> None:
    harness = Harness()
    first = harness.submit(prompt(200), 60)
    harness.step(2)
    harness.arm(fail_commits=3)
    others = [harness.submit(prompt(200, seed), 20) for seed in range(1, 4)]
    harness.finish()
    assert harness.tokens(first) == continuation(prompt(200), 60)
    for seed, request_id in enumerate(others, start=1):
        assert harness.tokens(request_id) == continuation(prompt(200, seed), 20)
    reply = harness.ask(ArmFaults(1))
    assert reply.result is not None
    assert reply.result["injected"]["commit"] == 3
    harness.assert_idle()


def test_requests_told_to_fail_fail_alone() -> None:
    harness = Harness()
    texts = {f"r-{seed}": prompt(50, seed) for seed in range(4)}
    for request_id, text in texts.items():
        harness.submit(text, 30, request_id=request_id)
    harness.step(5)
    harness.arm(requests={"r-1": "nan", "r-2": "error"})
    harness.finish()
    assert harness.end("r-1").error_code == "numerical_error"
    assert harness.end("r-2").error_code == "model_error"
    for request_id in ("r-0", "r-3"):
        assert harness.tokens(request_id) == continuation(texts[request_id], 30)
    for request_id in ("r-1", "r-2"):
        got = harness.tokens(request_id)
        assert 0 < len(got) < 30
        assert got == continuation(texts[request_id], len(got))
    assert harness.generate(prompt(30), 5, request_id="r-9") == continuation(prompt(30), 5)
    harness.assert_idle()


def test_nan_in_a_prefill_hits_the_rows_of_its_request_only() -> None:
    harness = Harness(faults=FaultPlan(requests={"bad": "nan"}))
    good = [harness.submit(prompt(40, seed), 5) for seed in range(2)]
    harness.submit(prompt(70), 5, request_id="bad")
    last = harness.submit(prompt(30), 5)
    harness.finish()
    assert harness.end("bad").error_code == "numerical_error"
    assert harness.tokens(good[1]) == continuation(prompt(40, 1), 5)
    assert harness.tokens(last) == continuation(prompt(30), 5)


def test_free_pages_hold_nan_when_a_step_begins() -> None:
    """Also those that were used before; what is read of them shows."""
    model = SpyingModel()
    harness = Harness(model=model)
    for seed in range(6):
        harness.generate(prompt(150, seed), 10)
    harness.ask(PoolCommand(1, "reclaim", 64))
    assert harness.engine.pool.free_pages == 64
    harness.generate(prompt(20), 4)
    assert model.numbers_seen <= 24


def test_the_clock_can_be_stepped() -> None:
    harness = Harness()
    request_id = harness.submit(prompt(20), 50)
    harness.step(3)
    before = harness.engine.pool.now()
    harness.arm(step_clock_seconds=3600.0)
    assert harness.engine.pool.now() > before + 3600
    harness.finish()
    assert harness.tokens(request_id) == continuation(prompt(20), 50)


def test_a_real_engine_has_no_faults() -> None:
    harness = Harness("debug.faults=false")
    assert harness.ask(ArmFaults(1, FaultPlan())).error == "debug.faults is off"
    assert harness.generate(prompt(20), 5) == continuation(prompt(20), 5)
