"""When pages are moved together: runs of defragmentation, bounded step by step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from memd.histogram import MICRO, HistogramCounts
from memd.pool.defrag import PageMove
from memd.pool.move_pace import MovePace
from memd.pool.pool import Pool
from memd.types import DefragReason

REST_SECONDS = 1.0  # after a run or a look that found nothing, before memd starts one by itself
AFTER_FAILURE_SECONDS = 60.0
EARLY = 0.8  # of the fragmentation allowed, at which a run begins: it is not to be exceeded
IDLE_FACTOR = 8  # so many times the pages of a step are moved when no request waits for it


@dataclass(slots=True)
class Run:
    """A run under way, or one that has ended.

    `ended_at` is None while it is under way; `failed`: its last copy was not made.
    """

    reason: DefragReason
    started_at: float  # monotonic seconds
    fragmentation: float  # before it
    ended_at: float | None = None
    moved_pages: int = 0
    failed: bool = False


class Defragmenter:
    """Decides when a run begins, what each of its steps moves, and when it is over.

    A run begins after `every_requests` finished requests, near `max_fragmentation`, when a lowered
    limit or a short device wants blocks back, or when asked for; but only where moving pages makes
    a block empty. It ends when that is no longer so.

    Args:
        pool: Whose pages are moved.
        clock: Monotonic seconds.

    Attributes:
        every_requests, max_fragmentation, pages_per_step: Live settings; 0 requests: not for that.
        pace: Keeps a step below `pages_per_step` where so many would make it longer.
        run: Under way, or the last one.
    """

    def __init__(self, pool: Pool, clock: Callable[[], float]) -> None:
        self.every_requests = 0
        self.max_fragmentation = 1.0
        self.pages_per_step = 1
        self.pace = MovePace()
        self.run: Run | None = None
        self.runs: dict[tuple[str, str], int] = {
            (reason, outcome): 0
            for reason in get_args(DefragReason)
            for outcome in ("completed", "failed")
        }
        self.moved_pages = 0
        self.moved_bytes = 0
        self.step_seconds = HistogramCounts(MICRO)  # of a step's moves, as far as the host waits
        self._pool = pool
        self._clock = clock
        self._finished = 0  # requests, since the last run
        self._asked: DefragReason | None = None
        self._rest_until = 0.0

    @property
    def running(self) -> bool:
        """Whether a run is under way or has been asked for."""
        return self._asked is not None or (self.run is not None and self.run.ended_at is None)

    def ask(self, reason: DefragReason) -> None:
        """Have a run begin with the next step."""
        self._asked = reason

    def request_finished(self) -> None:
        """One more request has ended."""
        self._finished += 1

    def plan(self, wanted_back: DefragReason | None, idle: bool) -> list[PageMove]:
        """What to move before the next step; none when there is no run, and at its end.

        Args:
            wanted_back: Why blocks have to go back to the device now; None: they need not.
            idle: Nothing is computed in this step.
        """
        if not self.running and not self._begins(wanted_back):
            return []
        moves = self._pool.relocator.plan(self._most_pages(wanted_back, idle))
        reason, self._asked = self._asked or wanted_back, None
        if not moves:
            self._end(failed=False)
        elif self.run is None or self.run.ended_at is not None:
            fragmentation = self._pool.blocks.fragmentation
            self._finished = 0
            self.run = Run(reason or self._reason(), self._clock(), fragmentation)
        return moves

    def moved(self, moves: list[PageMove], seconds: float, idle: bool) -> None:
        """A plan has been made and carried out; it took the host so long."""
        assert self.run is not None
        if not idle:
            self.pace.moved(len(moves), seconds)
        self.run.moved_pages += len(moves)
        self.moved_pages += len(moves)
        self.moved_bytes += sum(self._pool.layout.size_bytes(move.packed) for move in moves)
        self.step_seconds.observe(seconds)

    def failed(self) -> None:
        """A plan could not be carried out: the run ends, and the next waits for longer."""
        self._end(failed=True)
        self._rest_until = self._clock() + AFTER_FAILURE_SECONDS

    def _most_pages(self, wanted_back: DefragReason | None, idle: bool) -> int:
        if idle:
            return self.pages_per_step * IDLE_FACTOR
        return self.pages_per_step if wanted_back else self.pace.pages(self.pages_per_step)

    def _begins(self, wanted_back: DefragReason | None) -> bool:
        blocks = self._pool.blocks
        due = 0 < self.every_requests <= self._finished
        if blocks.surplus_blocks <= 0:
            self._finished = 0 if due else self._finished
            return False
        if self._clock() < self._rest_until:
            return False
        return due or wanted_back is not None or self._fragmented

    @property
    def _fragmented(self) -> bool:
        """Whether the limit is near; 100% is none."""
        limit = self.max_fragmentation
        return limit < 1.0 and self._pool.blocks.fragmentation > EARLY * limit

    def _reason(self) -> DefragReason:
        return "fragmentation" if self._fragmented else "requests"

    def _end(self, failed: bool) -> None:
        now, run = self._clock(), self.run
        self._rest_until = now + REST_SECONDS
        if run is not None and run.ended_at is None:
            run.ended_at, run.failed = now, failed
            self.runs[run.reason, "failed" if failed else "completed"] += 1
