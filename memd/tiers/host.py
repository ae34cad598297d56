"""The host tier's memory and the thread that copies pages to and from it."""

import logging
import queue
import threading
from collections.abc import Sequence

import torch

from memd.arena.cpu import CpuDriver
from memd.pool.layout import KVLayout
from memd.pool.moves import Transfer
from memd.types import SlotId, TransferId

logger = logging.getLogger(__name__)


class HostCopier:
    """Copies pages between the arena and one region of host memory, in a thread of its own.

    The region is reserved with the first copy, since most engines on a CPU never make one, and
    takes memory as slots are first written.
    """

    def __init__(self) -> None:
        self._memory: CpuDriver | None = None
        self._reserving = threading.Lock()
        self._todo: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[TransferId, bool]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="host-copies", daemon=True)

    def open(self, device: torch.Tensor, layout: KVLayout, num_slots: int) -> None:
        """Remember where pages are and start the thread."""
        self._device = device
        self._layout = layout
        self._num_slots = num_slots
        self._thread.start()

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Begin copies, in order."""
        for transfer in transfers:
            self._todo.put(transfer)

    def slot(self, slot: SlotId) -> torch.Tensor | None:
        """The memory of a slot that no copy uses now, uint8 `[page_bytes]`."""
        return self._slot(slot, self._layout.page_bytes)

    def poll(self) -> list[tuple[TransferId, bool]]:
        """Transfers that have ended since the last call, and whether they succeeded."""
        ended: list[tuple[TransferId, bool]] = []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return ended

    def close(self) -> None:
        """Abandon what has not been reported."""
        self._todo.put(None)
        self._thread.join()
        if self._memory is not None:
            self._memory.close()

    def _work(self) -> None:
        while (transfer := self._todo.get()) is not None:
            try:
                size_bytes = self._layout.size_bytes(transfer.packed)
                page, slot = self._page(transfer), self._slot(transfer.slot, size_bytes)
                if transfer.path == "d2h":
                    slot.copy_(page)
                else:
                    page.copy_(slot)
            except Exception:
                logger.exception("copy %s of page %d failed", transfer.path, transfer.page)
                self._ended.put((transfer.id, False))
            else:
                self._ended.put((transfer.id, True))

    def _page(self, transfer: Transfer) -> torch.Tensor:
        layout, packed = self._layout, transfer.packed
        offset_bytes = layout.page_offset_bytes(transfer.page, packed)
        return self._device.narrow(0, offset_bytes, layout.size_bytes(packed))

    def _slot(self, slot: SlotId, size_bytes: int) -> torch.Tensor:
        room_bytes = self._layout.page_bytes
        with self._reserving:  # the first to come may be the engine or the thread
            if self._memory is None:
                memory = CpuDriver()
                memory.reserve(self._num_slots * room_bytes)
                self._memory = memory
        return self._memory.tensor().narrow(0, slot * room_bytes, size_bytes)
