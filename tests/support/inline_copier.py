"""A copier without a thread: tests that step the engine themselves see the same each time."""

from collections.abc import Sequence

import torch

from memd.pool.layout import KVLayout
from memd.pool.moves import Transfer
from memd.types import SlotId, TransferId


class InlineCopier:
    """Copies when it is told to, and reports at the next poll; keeps each slot apart."""

    def __init__(self) -> None:
        self._slots: dict[SlotId, torch.Tensor] = {}
        self._ended: list[TransferId] = []

    def open(self, device: torch.Tensor, layout: KVLayout, num_slots: int) -> None:
        self._device = device
        self._layout = layout

    def start(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            offset = self._layout.page_offset_bytes(transfer.page, transfer.packed)
            size = self._layout.size_bytes(transfer.packed)
            page = self._device.narrow(0, offset, size)
            if transfer.path == "d2h":
                self.slot(transfer.slot)[:size].copy_(page)
            else:
                page.copy_(self._slots[transfer.slot][:size])
            self._ended.append(transfer.id)

    def slot(self, slot: SlotId) -> torch.Tensor:
        if slot not in self._slots:
            self._slots[slot] = torch.empty(self._layout.page_bytes, dtype=torch.uint8)
        return self._slots[slot]

    def poll(self) -> list[tuple[TransferId, bool]]:
        ended, self._ended = self._ended, []
        return [(transfer_id, True) for transfer_id in ended]

    def close(self) -> None:
        self._ended.clear()
