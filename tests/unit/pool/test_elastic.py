"""When the pool takes and gives back memory."""

from collections.abc import Callable

import pytest
from pool_model import FakeBacking

from memd.pool.elastic import BLOCKS_PER_STEP, Elastic
from memd.pool.layout import KVLayout
from memd.pool.limit import PoolLimit
from memd.pool.pool import Pool
from memd.pool.pressure import LOOK_SECONDS, Pressure
from memd.pool.watermarks import Watermarks

PER_BLOCK = 4
BLOCK_BYTES = PER_BLOCK * 8


class Machine:
    """A pool of 16 blocks and what the device has free."""

    def __init__(self, capacity: int = 64, most: int = 256) -> None:
        self.time = 0.0
        self.free_bytes: int | None = 10**9
        self.backing = FakeBacking()
        layout = KVLayout(1, 1, 1, 1, 4, BLOCK_BYTES)
        self.pool = Pool(layout, capacity, self.backing, Watermarks(0.9, 0.7), lambda: self.time)
        self.pressure = Pressure(self.free, BLOCK_BYTES, lambda: self.time)
        self.limit = PoolLimit(self.pool, most)
        self.elastic = Elastic(self.pool, self.limit, self.pressure, lambda: self.time)
        self.elastic.idle_seconds = 60.0

    def free(self) -> int:
        if self.free_bytes is None:
            raise OSError("nobody tells")
        return self.free_bytes

    def step(
        self,
        seconds: float = 0.0,
        expected: int = 0,
        needed: int = 0,
        in_flight: float | None = None,
    ) -> None:
        self.time += seconds
        self.elastic.begin_step(lambda: needed)
        self.elastic.resize(in_flight, expected)

    @property
    def committed(self) -> int:
        return self.pool.blocks.committed_blocks


def test_empty_blocks_stay_for_the_idle_time_then_go_longest_empty_first() -> None:
    machine = Machine()
    blocks = machine.pool.blocks
    pages = blocks.take(12)
    blocks.put(pages[:4])
    machine.step(30.0)
    blocks.put(pages[4:8])
    machine.step(29.0)
    assert machine.committed == 3
    machine.step(2.0)
    assert machine.committed == 2
    assert not blocks.is_committed(pages[0] // PER_BLOCK)
    machine.step(30.0)
    assert machine.committed == 1
    assert machine.elastic.shrunk_blocks == {"limit": 0, "pressure": 0, "idle": 2, "admin": 0}
    assert machine.elastic.grown_blocks == {"demand": 3, "ahead": 0}


def test_what_a_step_in_flight_may_read_stays() -> None:
    machine = Machine()
    machine.elastic.idle_seconds = 0.0
    blocks = machine.pool.blocks
    machine.time = 10.0
    blocks.put(blocks.take(4))  # while a step runs that was launched at 5
    machine.step(1.0, in_flight=5.0)
    assert machine.committed == 1
    machine.step(1.0, in_flight=10.5)
    assert machine.committed == 0
    assert machine.backing.settled == 0, "the step under way is not waited for"


def test_blocks_are_taken_ahead_of_need_a_few_a_step_and_kept() -> None:
    machine = Machine()
    machine.step(expected=33, in_flight=0.0)
    assert machine.committed == BLOCKS_PER_STEP
    for _ in range(8):
        machine.step(1.0, expected=33, in_flight=0.0)
    assert machine.committed == 9
    machine.step(100.0, expected=33, in_flight=machine.time)
    assert machine.committed == 9, "they are still expected to be needed"
    assert machine.elastic.grown_blocks == {"demand": 0, "ahead": 9}
    machine.step(100.0, expected=10_000)
    assert machine.committed == 16, "within the limit"
    machine.step(100.0)
    assert machine.committed == 0


def test_a_device_that_refuses_is_not_asked_again_at_once() -> None:
    machine = Machine()
    machine.backing.refuse = True
    machine.step(expected=8)
    machine.backing.refuse = False
    machine.step(0.1, expected=8)
    assert machine.committed == 0
    machine.step(2.0, expected=8)
    assert machine.committed == 2


def look(free: int, before: Callable[[Pressure], None] = lambda _: None) -> Pressure:
    pressure = Pressure(lambda: free, 100, lambda: 0.0)
    pressure.reserve_bytes = 1000
    before(pressure)
    pressure.look(committed_blocks=10)
    return pressure


@pytest.mark.parametrize(
    ("free", "active", "cap"),
    [
        (999, True, 7),
        (0, True, 1),
        (1000, False, 10),
        (1249, False, 10),
        (1250, False, 10),
        (1349, False, 10),
        (1350, False, 11),
        (10**6, False, 9997),
    ],
)
def test_the_cap_leaves_the_reserve_free(free: int, active: bool, cap: int) -> None:
    pressure = look(free)
    assert (pressure.active, pressure.cap_blocks) == (active, cap)


def test_between_reserve_and_relief_nothing_changes() -> None:
    machine = Machine()
    machine.pressure.reserve_bytes = 100 * BLOCK_BYTES
    machine.pool.blocks.put(machine.pool.blocks.take(40))
    machine.free_bytes = 99 * BLOCK_BYTES
    machine.step(1.0)
    assert machine.pressure.active
    assert machine.limit.target_pages == 1 * PER_BLOCK
    assert machine.committed == 1, "26 blocks are missing, 1 is the least"
    assert machine.elastic.shrunk_blocks["pressure"] == 9
    for free in (101, 124, 110, 100):
        machine.free_bytes = free * BLOCK_BYTES
        machine.step(1.0)
        assert machine.pressure.active
        assert machine.limit.target_pages == 1 * PER_BLOCK
    machine.free_bytes = 128 * BLOCK_BYTES
    machine.step(1.0)
    assert not machine.pressure.active
    assert machine.limit.target_pages == 4 * PER_BLOCK, (
        "what is free beyond the relief, and its own"
    )


def test_free_memory_that_nobody_tells_is_no_pressure() -> None:
    machine = Machine()
    machine.pressure.reserve_bytes = 100
    machine.free_bytes = None
    machine.step(LOOK_SECONDS)
    assert machine.pressure.device_free_bytes is None
    assert machine.limit.target_pages == 64


def test_a_lower_limit_never_falls_below_what_was_accepted() -> None:
    machine = Machine()
    machine.limit.configure(8)
    machine.step(needed=30)
    assert machine.pool.capacity_pages == 30
    assert machine.limit.waits_for == "requests"
    machine.step(needed=100)
    assert machine.pool.capacity_pages == 30, "and does not rise again either"
    machine.step(needed=0)
    assert machine.pool.capacity_pages == 8
    assert machine.limit.waits_for is None
    machine.step(needed=100)
    assert machine.pool.capacity_pages == 8
    machine.limit.configure(256)
    machine.step()
    assert machine.pool.capacity_pages == machine.pool.free_pages == 256
    assert len(machine.pool.pages.state) == 256


def test_under_pressure_a_request_that_was_accepted_gets_its_room() -> None:
    machine = Machine()
    machine.pressure.reserve_bytes, machine.free_bytes = 1000, 0
    machine.step(1.0)
    assert machine.pool.capacity_pages == PER_BLOCK
    machine.step(1.0, needed=40)
    assert machine.pool.capacity_pages == 40
    machine.step(1.0, needed=400)
    assert machine.pool.capacity_pages == 64, "within what the settings allow"


def test_pages_above_a_lowered_limit_are_told_and_nothing_is_taken() -> None:
    machine = Machine()
    blocks = machine.pool.blocks
    pages = blocks.take(40)
    machine.limit.configure(16)
    machine.step()
    assert (machine.pool.capacity_pages, machine.pool.free_pages) == (40, 0)
    assert machine.pool.obtainable_pages == 0
    blocks.put(pages[:30])
    machine.step()
    assert (machine.pool.capacity_pages, machine.pool.free_pages) == (16, 6)
    assert machine.committed <= 4
