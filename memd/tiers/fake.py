"""A copier with faults on demand. For tests and debugging."""

from collections.abc import Callable, Sequence

import torch

from memd.pool.layout import KVLayout
from memd.pool.residency import Transfer
from memd.types import TransferId


class FakeCopier:
    """Copies at once but reports late, or fails, as it is told; keeps each slot apart.

    Args:
        delay_polls: Polls that pass before a transfer is reported.
        fails: Whether a transfer fails; what it should have written is then left as it was.
    """

    def __init__(
        self,
        delay_polls: int = 0,
        fails: Callable[[Transfer], bool] = lambda transfer: False,
    ) -> None:
        self.delay_polls = delay_polls
        self.fails = fails
        self.started = 0
        self._slots: dict[int, torch.Tensor] = {}
        self._waiting: list[tuple[int, Transfer]] = []  # polls left, transfer

    def open(self, device: torch.Tensor, layout: KVLayout, num_slots: int) -> None:
        """Remember where pages are."""
        self._device = device
        self._layout = layout

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Begin copies, in order."""
        self.started += len(transfers)
        self._waiting += [(self.delay_polls, transfer) for transfer in transfers]

    def poll(self) -> list[tuple[TransferId, bool]]:
        """Transfers whose delay is over, and whether they succeeded."""
        due = [transfer for left, transfer in self._waiting if left <= 0]
        self._waiting = [(left - 1, transfer) for left, transfer in self._waiting if left > 0]
        return [(transfer.id, self._copy(transfer)) for transfer in due]

    def close(self) -> None:
        """Abandon what has not been reported."""
        self._waiting.clear()

    def _copy(self, transfer: Transfer) -> bool:
        if self.fails(transfer):
            return False
        offset = self._layout.page_offset_bytes(transfer.page)
        page = self._device.narrow(0, offset, self._layout.page_bytes)
        if transfer.path == "d2h":
            self._slots[transfer.slot] = page.clone()
        else:
            page.copy_(self._slots[transfer.slot])
        return True
