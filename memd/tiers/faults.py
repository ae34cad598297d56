"""A copier and a disk around others, with faults on demand. For tests and debugging."""

import os
from collections import deque
from collections.abc import Callable, Sequence

import torch

from memd.faults import Faults
from memd.pool.files import DiskReport, FileOrder, FileReport, FileTransfer
from memd.pool.layout import KVLayout
from memd.pool.moves import Transfer
from memd.tiers.copier import Copier
from memd.tiers.disk import Disk, SlotOf
from memd.tiers.page_files import PageFiles
from memd.types import SlotId, TransferId


class FaultyCopier:
    """Begins copies late, or fails them without touching what they should have written.

    A late copy reads and writes late too, so that a page reused or read before its report is found
    out.

    Args:
        inner: Carries out the copies that do not fail.
        faults: What to do.
        clock: Monotonic seconds.
    """

    def __init__(self, inner: Copier, faults: Faults, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._faults = faults
        self._clock = clock
        self._waiting: deque[tuple[float, Transfer]] = deque()  # not to begin before
        self._failed: list[TransferId] = []  # to be reported

    def open(self, device: torch.Tensor, layout: KVLayout, num_slots: int) -> None:
        """Get ready. Called once, before anything else."""
        self._inner.open(device, layout, num_slots)

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Begin copies, in order, as soon as their delay is over."""
        begins_at = self._clock() + self._faults.plan.delay_copies_seconds
        self._waiting += [(begins_at, transfer) for transfer in transfers]
        self._begin()

    def slot(self, slot: SlotId) -> torch.Tensor | None:
        """The memory of a slot; None: not there yet."""
        return self._inner.slot(slot)

    def poll(self) -> list[tuple[TransferId, bool]]:
        """Transfers that have ended since the last call, and whether they succeeded."""
        self._begin()
        failed, self._failed = self._failed, []
        return [(transfer_id, False) for transfer_id in failed] + self._inner.poll()

    def close(self) -> None:
        """Abandon what has not been reported."""
        self._inner.close()

    def _begin(self) -> None:
        now = self._clock()
        begun: list[Transfer] = []
        while self._waiting and self._waiting[0][0] <= now:
            _, transfer = self._waiting.popleft()
            if self._faults.copy_fails(transfer.path):
                self._failed.append(transfer.id)
            else:
                begun.append(transfer)
        if begun:
            self._inner.start(begun)


class FaultyDisk:
    """Begins late, refuses as a file system does, or leaves files that have lost their end.

    Args:
        inner: Carries out the orders that do not fail.
        faults: What to do.
        clock: Monotonic seconds.
    """

    def __init__(self, inner: Disk, faults: Faults, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._faults = faults
        self._clock = clock
        self._waiting: deque[tuple[float, FileOrder]] = deque()  # not to begin before
        self._failed: list[FileReport] = []
        self._writes: dict[TransferId, FileTransfer] = {}  # begun

    def open(self, files: PageFiles, slot_of: SlotOf) -> None:
        """Get ready. Called once, before anything else."""
        self._files = files
        self._inner.open(files, slot_of)

    def start(self, orders: Sequence[FileOrder]) -> None:
        """Begin as soon as the delay is over."""
        begins_at = self._clock() + self._faults.plan.delay_files_seconds
        self._waiting += [(begins_at, order) for order in orders]
        self._begin()

    def poll(self) -> list[DiskReport]:
        """What has ended or was found since the last call."""
        self._begin()
        reports: list[DiskReport] = [*self._failed, *self._inner.poll()]
        self._failed.clear()
        for report in reports:
            write = self._writes.pop(report.id, None) if isinstance(report, FileReport) else None
            if write is not None and self._faults.file_tears():
                path = self._files.path(write.file.key)
                if path.exists():
                    os.truncate(path, path.stat().st_size // 2)
        return reports

    def close(self) -> None:
        """Abandon what has not been reported."""
        self._inner.close()

    def _begin(self) -> None:
        now = self._clock()
        begun: list[FileOrder] = []
        while self._waiting and self._waiting[0][0] <= now:
            _, order = self._waiting.popleft()
            if isinstance(order, FileTransfer):
                fault = self._faults.file_fails(order.path)
                if fault is not None:
                    self._failed.append(FileReport(order.id, fault))
                    continue
                if order.path == "h2f":
                    self._writes[order.id] = order
            begun.append(order)
        if begun:
            self._inner.start(begun)
