"""How much memory the pool holds: grows ahead of need, and gives back what nobody needs."""

import math
from collections.abc import Callable
from typing import Literal, get_args

from memd.errors import OutOfDeviceMemory
from memd.pool.defrag import PageMove
from memd.pool.defragmenter import Defragmenter
from memd.pool.limit import PoolLimit
from memd.pool.pool import Pool
from memd.pool.pressure import Pressure
from memd.types import GrowReason, ShrinkReason

BLOCKS_PER_STEP = 2  # taken or given back while requests are computed: each costs some 0.1 ms
IDLE_BLOCKS_PER_STEP = 64
REFUSED_SECONDS = 1.0  # after the device had no block to give, before one is asked for ahead


class Elastic:
    """Decides, between steps, which blocks get memory and which give it back.

    Blocks that hold nothing stay for `idle_seconds`, so that the pool does not churn. Above the
    limit in force, or when the device is short of memory, they go at once, and pages are moved
    together until enough of them are empty.

    Args:
        pool: The KV memory's bookkeeping.
        limit: Of the same pool.
        pressure: What others on the device need; None: the memory cannot be given back.
        clock: Monotonic seconds.

    Attributes:
        idle_seconds: Live setting.
    """

    def __init__(
        self, pool: Pool, limit: PoolLimit, pressure: Pressure | None, clock: Callable[[], float]
    ) -> None:
        self.idle_seconds = math.inf
        self.limit = limit
        self.pressure = pressure
        self.defragmenter = Defragmenter(pool, clock)
        self._ahead_blocks = 0
        self._shrunk: dict[ShrinkReason, int] = dict.fromkeys(get_args(ShrinkReason), 0)
        self._pool = pool
        self._clock = clock
        self._refused_until = 0.0

    @property
    def reserve_bytes(self) -> int:
        """Device memory left free for others; a live setting."""
        return 0 if self.pressure is None else self.pressure.reserve_bytes

    @reserve_bytes.setter
    def reserve_bytes(self, reserve_bytes: int) -> None:
        if self.pressure is not None:
            self.pressure.reserve_bytes = reserve_bytes

    @property
    def busy(self) -> bool:
        """Whether something is left to do that the next step can do."""
        due = self._wanted_back is not None and bool(self._pool.blocks.empty_since)
        return self.defragmenter.running or due

    @property
    def grown_blocks(self) -> dict[GrowReason, int]:
        """Blocks that got memory since the start, by reason."""
        ahead = self._ahead_blocks
        return {"demand": self._pool.blocks.commits - ahead, "ahead": ahead}

    @property
    def shrunk_blocks(self) -> dict[ShrinkReason, int]:
        """Blocks that were given back since the start, by reason."""
        blocks = self._pool.blocks
        ordered = blocks.commits - blocks.committed_blocks - sum(self._shrunk.values())
        return {**self._shrunk, "admin": ordered}

    def begin_step(self, needed_pages: Callable[[], int]) -> None:
        """Put the limit in force; see `PoolLimit.advance`."""
        cap_pages = None
        if self.pressure is not None:
            self.pressure.look(self._pool.blocks.committed_blocks)
            if self.pressure.cap_blocks is not None:
                cap_pages = self.pressure.cap_blocks * self._pool.layout.pages_per_block
        self.limit.advance(cap_pages, needed_pages)

    def plan_moves(self, idle: bool) -> list[PageMove]:
        """What to move before the next step; `idle`: nothing is computed in it."""
        if self.pressure is None:
            return []
        packed = self._pool.blocks.used_blocks <= self.limit.target_blocks
        return self.defragmenter.plan(None if packed else self._wanted_back, idle)

    def resize(self, in_flight_since: float | None, expected_pages: int) -> None:
        """Give back and take blocks, a few at a time.

        Args:
            in_flight_since: When work on the oldest step began that may still run, moves for it
                included; None: none does.
            expected_pages: That running requests will take, as recent ones have.
        """
        if self.pressure is None:
            return
        blocks, idle = self._pool.blocks, in_flight_since is None
        most = IDLE_BLOCKS_PER_STEP if idle else BLOCKS_PER_STEP
        missing = expected_pages + blocks.taken_pages
        spare = blocks.committed_blocks - -(-missing // blocks.pages_per_block)
        reason = self._wanted_back
        if reason is not None:
            over = blocks.committed_blocks - self.limit.target_blocks
            self._give_back(min(over, most), reason, math.inf, in_flight_since)
        elif spare > 0:
            before = self._clock() - self.idle_seconds
            self._give_back(min(spare, most), "idle", before, in_flight_since)
        elif spare < 0:
            self._commit_ahead(min(-spare, most))

    @property
    def _wanted_back(self) -> Literal["pressure", "limit"] | None:
        """Why blocks have to go back now, if they have to."""
        if self._pool.blocks.committed_blocks <= self.limit.target_blocks:
            return None
        pressed = self.pressure is not None and self.pressure.active
        return "pressure" if pressed else "limit"

    def _give_back(
        self, count: int, reason: ShrinkReason, before: float, in_flight_since: float | None
    ) -> None:
        wait = in_flight_since is None
        emptied_before = before if in_flight_since is None else min(before, in_flight_since)
        given = self._pool.blocks.decommit_empty(max(0, count), emptied_before, wait)
        self._shrunk[reason] += given

    def _commit_ahead(self, count: int) -> None:
        now, before = self._clock(), self._pool.blocks.commits
        if now < self._refused_until:
            return
        try:
            self._pool.blocks.commit_ahead(count)
        except OutOfDeviceMemory:
            self._refused_until = now + REFUSED_SECONDS
        self._ahead_blocks += self._pool.blocks.commits - before
