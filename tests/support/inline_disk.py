"""A disk without threads: tests that step the engine themselves see the same each time."""

from collections.abc import Sequence

from memd.pool.files import DiskReport, FileOrder, FileTransfer
from memd.tiers.disk import SlotOf, index_of, perform
from memd.tiers.page_files import PageFiles


class InlineDisk:
    """Reads and writes when it is told to, and reports at the next poll."""

    def __init__(self) -> None:
        self._ended: list[DiskReport] = []
        self._files: PageFiles | None = None

    def open(self, files: PageFiles, slot_of: SlotOf) -> None:
        self._files = files
        self._slot_of = slot_of
        self._ended += index_of(files)

    def start(self, orders: Sequence[FileOrder]) -> None:
        for order in orders:
            page = None
            if isinstance(order, FileTransfer):
                slot = self._slot_of(order.slot)
                assert slot is not None
                page = memoryview(slot.numpy())
            assert self._files is not None
            report = perform(self._files, order, page)
            if report is not None:
                self._ended.append(report)

    def poll(self) -> list[DiskReport]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self._ended.clear()
        if self._files is not None:
            self._files.close()
