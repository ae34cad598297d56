"""Packs pages of running sequences between steps, and watches what that loses."""

import logging

from memd.engine.packing_errors import PackingErrors
from memd.engine.request import Request
from memd.engine.scheduler import Scheduler
from memd.engine.snapshot_types import EngineEvent, PackingSnapshot
from memd.evaluate.guard import MOST_ERROR, Verdict
from memd.pool.packing import packing_step_tokens
from memd.pool.pool import Pool
from memd.units import format_share

logger = logging.getLogger(__name__)


class Packing:
    """The engine's part of packed pages.

    What is due is packed as soon as it is computed: after a decode step, or after the whole chunk
    of a prompt. When packing loses more than the format may, it ends; what is packed stays.

    Args:
        pool: Packs, by a schedule.
        scheduler: Over the same pool.
        errors: What packing has lost.
        verdict: What packing lost when the model was loaded.

    Attributes:
        stopped: Why no more pages are packed; None: they are.
    """

    def __init__(
        self,
        pool: Pool,
        scheduler: Scheduler,
        errors: PackingErrors,
        verdict: Verdict,
    ) -> None:
        self.stopped: str | None = None
        self._pool = pool
        self._scheduler = scheduler
        self._errors = errors
        assert pool.packing is not None
        self._schedule = pool.packing
        self._verdict = verdict
        self._step_tokens = packing_step_tokens(self._schedule.page_tokens)
        self._events = [
            EngineEvent("packing_warning", warning, {"format": verdict.format})
            for warning in verdict.warnings
        ]

    def advance(self) -> None:
        """Pack what is due, before the step is planned whose tokens see it packed."""
        if self.stopped is not None:
            return
        for request in self._scheduler.running:
            due = request.num_computed - request.num_computed % self._step_tokens
            if due > request.packed_tokens:
                self._pack(request, due)

    def take_events(self) -> list[EngineEvent]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events

    def watch(self) -> None:
        """Take in what packing has lost lately, without waiting; stop it if that is too much."""
        self._errors.collect()
        form, recent = self._verdict.format, self._errors.recent
        limit = MOST_ERROR[form]
        if self.stopped is not None or recent is None or recent <= limit:
            return
        self.stopped = (
            f"packing in {form} has lost {format_share(round(recent, 4))} of the keys or values of "
            f"a KV head, more than {format_share(limit)}; no more pages are packed until a restart"
        )
        self._pool.packing = None  # what is admitted from now on has to fit in full pages
        logger.error("%s", self.stopped)
        details = {"format": form, "error": recent, "limit": limit}
        self._events.append(EngineEvent("packing_stopped", self.stopped, details))

    def snapshot(self) -> PackingSnapshot:
        """The state now."""
        blocks, layout, errors = self._pool.blocks, self._pool.layout, self._errors
        counters = self._pool.counters
        full_bytes = blocks.used_pages * layout.page_bytes
        saved_bytes = blocks.packed_pages * (layout.page_bytes - layout.size_bytes(True))
        return PackingSnapshot(
            format=self._verdict.format,
            due_pages={
                "packed": counters.packed,
                "failed": counters.packing_failed,
                "no_room": counters.packing_no_room,
            },
            saved_bytes=saved_bytes,
            compression_ratio=full_bytes / (full_bytes - saved_bytes) if full_bytes else None,
            mean_error=errors.mean,
            worst_error=errors.worst if errors.pages else None,
            most_error=MOST_ERROR[self._verdict.format],
            load_error=self._verdict.worst_error,
            warnings=self._verdict.warnings,
            stopped=self.stopped,
        )

    def _pack(self, request: Request, due: int) -> None:
        sequence = request.sequence
        if sequence is None:
            return
        self._pool.pack(sequence, due)
        # Pages of steps whose results are not there yet are packed when they are.
        last = self._schedule.packed_pages(due).stop
        if sequence.sealed_pages >= min(last, self._pool.retention.publishable_pages(sequence)):
            request.packed_tokens = due
