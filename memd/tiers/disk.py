"""Threads that read and write page files, and what they report to the engine."""

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from memd.pool.files import (
    DiskReport,
    FileChanges,
    FileOrder,
    FileReport,
    FileTransfer,
    IndexReport,
)
from memd.tiers.page_files import PageFiles, RejectedFile, fault_of
from memd.types import BadFile, SlotId

logger = logging.getLogger(__name__)

WORKERS = 4  # enough to keep a drive busy while each also computes checksums
INDEX_PART = 1000  # keys told at once: bounds what one step has to learn
MAX_PARTS_AT_ONCE = 4

SlotOf = Callable[[SlotId], torch.Tensor | None]
Job = tuple[FileOrder, memoryview | None]


class Disk(Protocol):
    """What the engine asks of whoever reads and writes page files.

    It owns the bytes of a host slot from `start` until it reports the transfer, and never calls in:
    the engine polls.
    """

    def open(self, files: PageFiles, slot_of: SlotOf) -> None:
        """Get ready and begin to tell what is there. Called once, before anything else.

        Args:
            files: The directory, which is open.
            slot_of: See `Copier.slot`.
        """

    def start(self, orders: Sequence[FileOrder]) -> None:
        """Begin, in any order."""

    def poll(self) -> list[DiskReport]:
        """What has ended or was found since the last call."""

    def close(self) -> None:
        """Abandon what has not been reported."""


class DiskThreads:
    """Worker threads over one directory. `open`, `start`, `poll`, `close`: engine thread only."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[DiskReport] = queue.SimpleQueue()
        self._index: queue.SimpleQueue[IndexReport] = queue.SimpleQueue()
        self._waiting: deque[FileTransfer] = deque()  # for memory behind their slots
        self._threads: list[threading.Thread] = []
        self._files: PageFiles | None = None  # None: not open
        self._closing = False

    def open(self, files: PageFiles, slot_of: SlotOf) -> None:
        """Start the threads; one of them reads the directory first."""
        self._files = files
        self._slot_of = slot_of
        for number in range(WORKERS):
            work = self._scan_and_work if number == 0 else self._work
            thread = threading.Thread(
                target=work, args=(files,), name=f"disk-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def start(self, orders: Sequence[FileOrder]) -> None:
        """Begin, in any order."""
        for order in orders:
            if isinstance(order, FileTransfer):
                self._waiting.append(order)
            else:
                self._todo.put((order, None))
        self._hand_out()

    def poll(self) -> list[DiskReport]:
        """What has ended or was found since the last call."""
        self._hand_out()
        reports: list[DiskReport] = []
        while not self._ended.empty():
            reports.append(self._ended.get())
        parts = min(self._index.qsize(), MAX_PARTS_AT_ONCE)
        return [*reports, *(self._index.get() for _ in range(parts))]

    def close(self) -> None:
        """Abandon what has not been begun. A thread that the disk holds up is not waited for long:
        it dies with the process, and leaves whole files only.
        """
        self._closing = True
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)
        if self._files is not None:
            self._files.close()

    def _hand_out(self) -> None:
        """Give transfers to the threads as soon as there is memory behind their slots."""
        for _ in range(len(self._waiting)):
            transfer = self._waiting.popleft()
            try:
                slot = self._slot_of(transfer.slot)
            except Exception:
                logger.exception("host slot %d has no memory", transfer.slot)
                self._ended.put(FileReport(transfer.id, fault="failed"))
                continue
            if slot is None:
                self._waiting.append(transfer)
            else:
                self._todo.put((transfer, slot.numpy().data))

    def _work(self, files: PageFiles) -> None:
        while (job := self._todo.get()) is not None:
            if self._closing:
                continue
            report = perform(files, *job)
            if report is not None:
                self._ended.put(report)

    def _scan_and_work(self, files: PageFiles) -> None:
        for part in index_of(files):
            if self._closing:
                return
            self._index.put(part)
        self._work(files)


def perform(files: PageFiles, order: FileOrder, page: memoryview | None) -> FileReport | None:
    """Carry out one order.

    Args:
        page: The bytes of the slot that a transfer is about, with room for a page of any format.
    """
    if isinstance(order, FileChanges):
        for key in order.remove:
            _remove(files, key)
        for key in order.touch:
            files.touch(key)
        return None
    assert page is not None
    page = page[: files.page_bytes(order.file.packed)]
    try:
        for key in order.remove:  # or the directory would outgrow its limit
            files.remove(key)
        if order.path == "h2f":
            files.write(order.file, page)
        else:
            files.read(order.file, page)
    except RejectedFile as error:
        path = files.path(order.file.key)
        logger.warning("%s is of no use (%s) and is removed", path, error.reason)
        _remove(files, order.file.key)
        return FileReport(order.id, bad=error.reason)
    except OSError as error:
        logger.warning("%s: %s", files.path(order.file.key), error)
        return FileReport(order.id, fault=fault_of(error))
    except Exception:
        logger.exception("%s failed", order.path)
        return FileReport(order.id, fault="failed")
    return FileReport(order.id)


def index_of(files: PageFiles) -> list[IndexReport]:
    """What a directory holds, in parts, most recently used first; removes what is of no use."""
    found: list[tuple[float, bytes]] = []
    packed: set[bytes] = set()
    rejected: Counter[BadFile] = Counter()
    try:
        for file in files.scan():
            if file.bad is None:
                found.append((file.used_at, file.key))
                if file.packed:
                    packed.add(file.key)
            else:
                rejected[file.bad] += 1
                _remove(files, file.key)
    except OSError as error:
        logger.warning("%s cannot be read: %s", files.directory, error)
        return [IndexReport(fault=fault_of(error), last=True)]
    if rejected:
        logger.warning("%s: files of no use are removed: %s", files.directory, dict(rejected))
    found.sort(reverse=True)
    keys = [key for _, key in found]
    parts = [tuple(keys[at : at + INDEX_PART]) for at in range(0, len(keys), INDEX_PART)]
    reports = [IndexReport(part, frozenset(packed.intersection(part))) for part in parts]
    return [*reports, IndexReport(rejected=dict(rejected), last=True)]


def _remove(files: PageFiles, key: bytes) -> None:
    try:
        files.remove(key)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", files.path(key), error)
