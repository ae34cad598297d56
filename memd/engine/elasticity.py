"""Carries out what the elastic pool decides: moves pages on the device, and tells what was done."""

import logging
import math
from collections.abc import Callable
from typing import Any

from memd.engine.limits import longest_request
from memd.engine.request import Request
from memd.engine.scheduler import Scheduler
from memd.engine.snapshot_types import ElasticSnapshot, EngineEvent
from memd.errors import MemdError, SettingsError
from memd.histogram import HistogramCounts
from memd.pool.defragmenter import Run
from memd.pool.elastic import Elastic
from memd.pool.pool import Pool
from memd.pool_size import limit_pages
from memd.types import DefragReason
from memd.units import format_share, format_size

logger = logging.getLogger(__name__)

RECENT_REQUESTS = 32  # over which lengths of generations are averaged
NOT_ELASTIC = "the device has no virtual memory: the pool is one allocation, kept to the end"
EXPECTED_SECONDS = 0.05  # for which an estimate holds: each looks at every running request
TOLD_SECONDS = 10.0  # blocks taken and given back within it are one event


class NotElastic(MemdError):
    """Memory cannot be given back on this device."""


class Elasticity:
    """The engine's part of the elastic pool.

    Args:
        pool: The KV memory's bookkeeping.
        elastic: Decides about it.
        scheduler: Over the same pool.
        base_bytes: What a limit as a share is a share of.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        pool: Pool,
        elastic: Elastic,
        scheduler: Scheduler,
        base_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.elastic = elastic
        self._pool = pool
        self._scheduler = scheduler
        self._base_bytes = base_bytes
        self._clock = clock
        self._mean_tokens = 0.0
        self._finished = 0
        self._expected_at, self._expected = -math.inf, 0
        self._events: list[EngineEvent] = []
        self._told_run: Run | None = None
        self._pressed = self._lowered = False
        self._told_at = clock()
        self._told_blocks = self._resized()

    @property
    def limit(self) -> int:
        """The setting `memory.limit` in force, in bytes of whole blocks."""
        blocks = -(-self._pool.configured_pages // self._pool.layout.pages_per_block)
        return blocks * self._pool.layout.block_bytes

    @limit.setter
    def limit(self, limit: str | int) -> None:
        self.elastic.limit.configure(self._pages(limit))

    def refusal(self, limit: str | int) -> str | None:
        """Why a limit cannot be put in force while the engine runs; None: it can."""
        most, layout = self.elastic.limit.most_pages, self._pool.layout
        if self.elastic.pressure is None:
            return f"memory.limit needs a restart: {NOT_ELASTIC}"
        try:
            pages = self._pages(limit)
        except SettingsError as error:
            return str(error)
        if pages <= most:
            return None
        return (
            f"memory.limit: {limit!r} is {pages} pages, the address range of the pool has {most} "
            f"({format_size(most // layout.pages_per_block * layout.block_bytes)})"
        )

    def ask(self, reason: DefragReason) -> dict[str, Any]:
        """Have a run of defragmentation begin with this step.

        Raises:
            NotElastic: moving pages would give nothing back.
        """
        if self.elastic.pressure is None:
            raise NotElastic(NOT_ELASTIC)
        blocks, joins = self._pool.blocks, self.elastic.defragmenter.running
        if blocks.surplus_blocks > 0:
            self.elastic.defragmenter.ask(reason)
        return {
            "started": blocks.surplus_blocks > 0 and not joins,
            "running": self.elastic.defragmenter.running,
            "fragmentation_ratio": blocks.fragmentation,
            "surplus_blocks": max(0, blocks.surplus_blocks),
        }

    def begin_step(self) -> None:
        """Put the limit in force, before the step is planned."""
        self.elastic.begin_step(self._longest_pages)

    def move(self, idle: bool) -> None:
        """Move pages, before the step is launched that reads them at their new places.

        Args:
            idle: No step is.
        """
        started_at = self._clock()
        moves = self.elastic.plan_moves(idle)
        if not moves:
            return
        try:
            self._pool.relocate(moves)
        except Exception:
            logger.exception("%d pages could not be moved", len(moves))
            self.elastic.defragmenter.failed()
            return
        if idle:  # no step is behind the copies whose end would tell of theirs
            self._pool.blocks.settle()
        self.elastic.defragmenter.moved(moves, self._clock() - started_at, idle)

    def stepped(self, seconds: float) -> None:
        """A step has ended, after so long."""
        self.elastic.defragmenter.pace.stepped(seconds)

    def resize(self, in_flight_since: float | None) -> None:
        """Take and give back blocks, while the device works; see `Elastic.resize`."""
        blocks = self._pool.blocks
        expected = self._expected_pages() if blocks.committed_blocks < blocks.limit_blocks else 0
        self.elastic.resize(in_flight_since, expected)
        self._note()

    def finished(self, request: Request) -> None:
        """A request has ended; the next are expected to be like it."""
        self._finished += 1
        weight = 1 / min(self._finished, RECENT_REQUESTS)
        self._mean_tokens += weight * (request.num_generated - self._mean_tokens)
        self.elastic.defragmenter.request_finished()

    def take_events(self) -> list[EngineEvent]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> ElasticSnapshot:
        """The state now."""
        elastic, blocks = self.elastic, self._pool.blocks
        defragmenter, run = elastic.defragmenter, elastic.defragmenter.run
        seconds: HistogramCounts = defragmenter.step_seconds
        pressure = elastic.pressure
        return ElasticSnapshot(
            limit_pages=self._pool.configured_pages,
            max_model_len=longest_request(self._scheduler.max_model_len, self._pool),
            target_pages=elastic.limit.target_pages,
            limit_waits_for=elastic.limit.waits_for,
            fragmentation_ratio=blocks.fragmentation,
            max_fragmentation_ratio=defragmenter.max_fragmentation,
            empty_blocks=len(blocks.empty_since),
            defrag_running=defragmenter.running,
            defrag_runs={
                reason: {each: defragmenter.runs[reason, each] for each in ("completed", "failed")}
                for reason, _ in defragmenter.runs
            },
            defrag_moved_pages=defragmenter.moved_pages,
            defrag_moved_bytes=defragmenter.moved_bytes,
            defrag_last_run=None if run is None else _run(run, self._clock()),
            defrag_step_seconds=(list(seconds.buckets), list(seconds.counts), seconds.total),
            grown_blocks={str(reason): count for reason, count in elastic.grown_blocks.items()},
            shrunk_blocks={str(reason): count for reason, count in elastic.shrunk_blocks.items()},
            under_pressure=pressure is not None and pressure.active,
            device_free_bytes=None if pressure is None else pressure.device_free_bytes,
        )

    def _pages(self, limit: str | int) -> int:
        layout = self._pool.layout
        sizes = layout.page_tokens, layout.page_bytes, layout.block_bytes
        return limit_pages(limit, self._base_bytes, *sizes)

    def _longest_pages(self) -> int:
        """Most pages that the longest open request holds at once."""
        longest = max((each.max_length for each in self._scheduler.requests.values()), default=0)
        return self._pool.retention.peak_pages(longest)

    def _expected_pages(self) -> int:
        """Pages that running requests will still take, if they become as long as recent ones."""
        now = self._clock()
        if now - self._expected_at >= EXPECTED_SECONDS:
            mean = int(self._mean_tokens)
            tokens = sum(
                max(0, min(mean, each.sampling.max_tokens) - each.num_generated)
                for each in self._scheduler.running
            )
            self._expected_at = now
            self._expected = self._pool.layout.pages_for(tokens)
        return self._expected

    def _note(self) -> None:
        """Make events of what has changed."""
        run = self.elastic.defragmenter.run
        if run is not None and run.ended_at is not None and run is not self._told_run:
            self._told_run = run
            self._tell("defrag", _words(run), _run(run, run.ended_at))
        pressure = self.elastic.pressure
        if pressure is not None and pressure.active != self._pressed:
            self._pressed = pressure.active
            free = format_size(pressure.device_free_bytes or 0)
            words = "is short of" if self._pressed else "has enough"
            message = f"the device {words} memory for others: {free} are free"
            self._tell("memory_pressure", message, {"active": self._pressed})
        waits = self.elastic.limit.waits_for
        if (waits is not None) != self._lowered:
            self._lowered = waits is not None
            message = f"the pool comes down to {self.elastic.limit.target_pages} pages"
            if waits is None:
                message = f"the pool keeps its limit of {self.elastic.limit.target_pages} pages"
            self._tell("memory_limit", message, {"waits_for": waits})
        if self._clock() - self._told_at >= TOLD_SECONDS:
            self._tell_blocks()

    def _tell_blocks(self) -> None:
        """One event for the blocks taken and given back lately."""
        self._told_at, former, now = self._clock(), self._told_blocks, self._resized()
        changed = {name: now[name] - former[name] for name in now if now[name] != former[name]}
        self._told_blocks = now
        if changed:
            held = format_size(self._pool.blocks.committed_blocks * self._pool.layout.block_bytes)
            words = ", ".join(f"{count} {name}" for name, count in changed.items())
            self._tell(
                "pool_resize", f"the pool holds {held}; blocks: {words}", {"blocks": changed}
            )

    def _resized(self) -> dict[str, int]:
        grown, shrunk = self.elastic.grown_blocks, self.elastic.shrunk_blocks
        return {
            **{f"taken ({reason})": count for reason, count in grown.items()},
            **{f"given back ({reason})": count for reason, count in shrunk.items()},
        }

    def _tell(self, kind: str, message: str, details: dict[str, Any]) -> None:
        logger.info("%s", message)
        self._events.append(EngineEvent(kind, message, details))


def _run(run: Run, now: float) -> dict[str, Any]:
    """A run for the operator."""
    return {
        "reason": run.reason,
        "moved_pages": run.moved_pages,
        "fragmentation_ratio_before": run.fragmentation,
        "seconds": (now if run.ended_at is None else run.ended_at) - run.started_at,
        "running": run.ended_at is None,
        "failed": run.failed,
    }


def _words(run: Run) -> str:
    end = "failed" if run.failed else "moved pages together"
    return (
        f"defragmentation ({run.reason}) {end}: {run.moved_pages} pages moved, "
        f"{format_share(round(run.fragmentation, 3))} were fragmented before it"
    )
