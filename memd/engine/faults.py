"""The engine's parts with faults on demand around them. For tests and debugging."""

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence

import torch
from memd_kernels.formats import PACKED_PAGE, PackedPages

from memd.arena.driver import ArenaDriver
from memd.arena.faults import FaultyDriver
from memd.engine.plan import StepPlan
from memd.engine.results import Collect
from memd.engine.runner import Forward, PlanRunner
from memd.engine.sampling import Vocabulary
from memd.faults import Faults
from memd.models.decoder import ForwardBatch
from memd.pool.defrag import PageMove
from memd.pool.pool import Pool
from memd.tiers.copier import Copier
from memd.tiers.disk import Disk
from memd.tiers.faults import FaultyCopier, FaultyDisk
from memd.types import PageId, RequestId

_log = logging.getLogger(__name__)
Clock = Callable[[], float]

NAN_BYTE = 255  # offsets and scales of packed pages that are made of it are no numbers


def with_faults(
    faults: Faults, driver: ArenaDriver, copier: Copier, disk: Disk, clock: Clock
) -> tuple[ArenaDriver, Copier, Disk, Clock]:
    """The same parts, doing what they are told to; those that wait run by the new clock."""
    _log.warning("debug.faults is on: faults can be injected. Serve nobody with this engine.")

    def stepped() -> float:
        return clock() + faults.clock_ahead_seconds

    copies, files = FaultyCopier(copier, faults, stepped), FaultyDisk(disk, faults, stepped)
    return FaultyDriver(driver, faults), copies, files, stepped


class FaultyRunner:
    """Does to requests, pages and logits what it is told to, then runs the plan.

    Args:
        faults: What to do.
        pool: Knows which pages are free.
        kv: All full pages (see `memd.arena.arena.Arena.kv`).
        packed: All packed ones; None: there are none.
        forward: The model.
        make_runner: The runner around a model.
    """

    def __init__(
        self,
        faults: Faults,
        pool: Pool,
        kv: torch.Tensor,
        packed: PackedPages | None,
        forward: Forward,
        make_runner: Callable[[Forward], PlanRunner],
    ) -> None:
        self._faults = faults
        self._pool = pool
        self._kv = kv
        self._packed = packed
        self._forward = forward
        self._runner = make_runner(self._forward_with_nan)
        self._plan = StepPlan([], [])
        self._filled: set[tuple[PageId, bool]] = set()  # free pages that hold NaN; packed or not

    @property
    def vocabulary(self) -> Vocabulary:
        return self._runner.vocabulary

    @property
    def steps_ahead(self) -> int:
        return self._runner.steps_ahead

    def move(self, moves: Sequence[PageMove]) -> None:
        """Copy pages, unless that is told to fail; "kill": when they are copied, and no more."""
        fault = self._faults.of_moves()
        if fault == "error":
            raise RuntimeError("told to fail")
        self._runner.move(moves)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def pack(self, moves: Sequence[PageMove]) -> None:
        """Pack pages, unless that is told to fail; "kill": when they are packed, and no more."""
        fault = self._faults.of_moves()
        if fault == "error":
            raise RuntimeError("told to fail")
        self._runner.pack(moves)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def launch(self, plan: StepPlan) -> Collect:
        """Start a plan, unless one of its requests is told to fail."""
        for chunk in plan.chunks:
            self._strike(chunk.request.id)
        if self._faults.plan.nan_in_free_pages:
            self._fill_free_pages()
            self._fill_unwritten(plan)
        self._plan = plan
        return self._runner.launch(plan)

    def _strike(self, request_id: RequestId) -> None:
        fault = self._faults.of_request(request_id)
        if fault is None or fault == "nan":
            return
        self._faults.injected[fault] += 1
        _log.warning("%s at request %s, as told", fault, request_id)
        match fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while True:
                    time.sleep(60)
            case "error":
                raise RuntimeError("told to fail")

    def _forward_with_nan(
        self, batch: ForwardBatch, kv: torch.Tensor, packed: PackedPages | None = None
    ) -> torch.Tensor:
        logits = self._forward(batch, kv) if packed is None else self._forward(batch, kv, packed)
        assert batch.logits_rows is not None
        first = 0
        for chunk in self._plan.chunks:
            last = first + chunk.count
            if self._faults.of_request(chunk.request.id) == "nan":
                rows = (batch.logits_rows >= first) & (batch.logits_rows < last)
                self._faults.injected["nan"] += int(rows.sum())
                logits[rows] = torch.nan
            first = last
        return logits

    def _fill_free_pages(self) -> None:
        blocks = self._pool.blocks
        free = {(page, blocks.is_packed(page)) for page in blocks.free_page_ids()}
        for page, packed in free - self._filled:
            if packed:
                self._packed_page(page).fill_(NAN_BYTE)
            else:
                self._page(page).fill_(torch.nan)
        self._filled = free

    def _fill_unwritten(self, plan: StepPlan) -> None:
        """Also what the pages in use hold beyond the tokens computed so far."""
        page_tokens = self._pool.layout.page_tokens
        for chunk in plan.chunks:
            sequence = chunk.request.sequence
            assert sequence is not None
            first, offset = divmod(chunk.start, page_tokens)
            for page in sequence.pages[first - sequence.dropped_pages :]:
                self._page(page)[..., offset:, :].fill_(torch.nan)
                offset = 0

    def _page(self, page: PageId) -> torch.Tensor:
        number = self._pool.layout.table_entry(page, False)
        return self._kv[divmod(number, self._kv.shape[1])]

    def _packed_page(self, page: PageId) -> torch.Tensor:
        assert self._packed is not None
        number = self._pool.layout.table_entry(page, True) - PACKED_PAGE
        return self._packed.memory[divmod(number, self._packed.memory.shape[1])]
