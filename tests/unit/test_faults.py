"""Faults on demand: what happens when, and the driver's checks of the arena."""

import pytest
import torch

from memd.arena.cpu import CpuDriver
from memd.arena.faults import FaultyDriver
from memd.errors import OutOfDeviceMemory
from memd.faults import FaultPlan, Faults
from memd.types import RequestId

GRANULE = CpuDriver.granule_bytes


def driver(plan: FaultPlan | None = None) -> FaultyDriver:
    made = FaultyDriver(CpuDriver(), Faults(plan))
    made.reserve(8 * GRANULE)
    return made


def test_nothing_happens_by_default() -> None:
    faults = Faults()
    assert not faults.commit_fails()
    assert not any(faults.copy_fails("d2h") or faults.copy_fails("h2d") for _ in range(100))
    assert faults.of_request(RequestId("r")) is None
    assert not +faults.injected


def test_a_request_is_named_by_its_own_id_its_sequences_or_any() -> None:
    faults = Faults(FaultPlan(requests={"a": "nan", "b-1": "kill"}))
    assert faults.of_request(RequestId("a-0")) == "nan"
    assert faults.of_request(RequestId("a")) == "nan"
    assert faults.of_request(RequestId("b-1")) == "kill"
    assert faults.of_request(RequestId("b-0")) is None
    faults.arm(FaultPlan(requests={"*": "hang"}))
    assert faults.of_request(RequestId("a-0")) == "hang"


def test_copies_fail_by_share_path_and_seed() -> None:
    def drawn(seed: int) -> list[bool]:
        faults = Faults(FaultPlan(seed=seed, fail_restores=0.25))
        assert not any(faults.copy_fails("d2h") for _ in range(50))
        return [faults.copy_fails("h2d") for _ in range(400)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert 60 < sum(drawn(1)) < 140


def test_the_clock_only_goes_ahead() -> None:
    faults = Faults(FaultPlan(step_clock_seconds=5.0))
    faults.arm(FaultPlan(step_clock_seconds=2.0))
    faults.arm(FaultPlan())
    assert faults.clock_ahead_seconds == 7.0


def test_the_next_commits_fail_and_change_nothing() -> None:
    arena = driver(FaultPlan(fail_commits=2))
    for _ in range(2):
        with pytest.raises(OutOfDeviceMemory, match="told to fail"):
            arena.commit(0, GRANULE)
    arena.commit(0, GRANULE)


def test_new_memory_holds_nan_in_every_format() -> None:
    arena = driver(FaultPlan(nan_in_free_pages=True))
    arena.commit(GRANULE, GRANULE)
    memory = arena.tensor()[GRANULE : 2 * GRANULE]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert memory.view(dtype).isnan().all()


@pytest.mark.parametrize(
    ("offset", "size"),
    [(1, GRANULE), (0, GRANULE - 1), (0, 0), (8 * GRANULE, GRANULE), (-GRANULE, GRANULE)],
)
def test_parts_that_are_none_are_refused(offset: int, size: int) -> None:
    arena = driver()
    with pytest.raises(ValueError, match=r"granules|outside"):
        arena.commit(offset, size)


def test_commits_and_decommits_must_match() -> None:
    arena = driver()
    arena.commit(0, 2 * GRANULE)
    with pytest.raises(ValueError, match="overlaps"):
        arena.commit(GRANULE, GRANULE)
    with pytest.raises(ValueError, match="not committed"):
        arena.decommit(0, GRANULE)
    arena.decommit(0, 2 * GRANULE)
    arena.commit(GRANULE, GRANULE)
    with pytest.raises(ValueError, match="twice"):
        arena.reserve(GRANULE)
