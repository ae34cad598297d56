"""What the engine asks of whoever copies pages between tiers."""

from collections.abc import Sequence
from typing import Protocol

import torch

from memd.pool.layout import KVLayout
from memd.pool.moves import Transfer
from memd.types import SlotId, TransferId


class Copier(Protocol):
    """Carries transfers out in the background and tells which have ended.

    It owns the bytes of a transfer from `start` until it reports it, and never calls in: the engine
    polls. Device pages being copied out are sealed, and those being copied in are nobody else's, so
    the engine's steps need no ordering against the copies beyond these reports. Steps that are only
    enqueued when a copy is started are the copier's business: it begins behind them.
    """

    def open(self, device: torch.Tensor, layout: KVLayout, num_slots: int) -> None:
        """Get ready. Called once, before anything else.

        Args:
            device: The whole arena, uint8 `[size_bytes]`.
            layout: Of its pages.
            num_slots: Places in host memory, each with room for a full page; a packed one lies at
                its begin.
        """

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Begin copies, in order."""

    def slot(self, slot: SlotId) -> torch.Tensor | None:
        """The memory of a slot that no copy uses now, uint8, with room for a full page; None: not
        there yet.

        Raises:
            OutOfDeviceMemory: there will be none.
        """

    def poll(self) -> list[tuple[TransferId, bool]]:
        """Transfers that have ended since the last call, and whether they succeeded."""

    def close(self) -> None:
        """Abandon what has not been reported."""
