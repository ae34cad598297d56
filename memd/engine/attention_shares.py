"""What share each page has of its sequence's attention, measured while sequences decode."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from memd.engine.plan import Chunk
from memd.engine.slots import Slots, slot_of, upload
from memd.pool.sequence import PoolSequence

READ_STEPS = 8  # the host looks at the sums so often
HALF_LIFE_STEPS = 64  # of a measurement in the moving average

# Which pages a slot's columns stand for: those of a sequence with so many dropped.
Columns = tuple[PoolSequence, int]


@dataclass(frozen=True)
class _Reading:
    """Sums on their way to the host."""

    sums: torch.Tensor
    columns: dict[int, Columns]
    steps: int
    arrived: torch.cuda.Event | None


class AttentionShares:
    """Sums over steps and layers on the device, and the moving averages made of them.

    The averages are `PoolSequence.shares`. The host never waits: it takes what has arrived. What
    was measured before a sequence let pages go, and has not arrived by then, is lost.

    Attributes:
        sums: [num_slots + 1, max_pages], float32; the last row stands for padding.

    Args:
        slots: Of the sequences.
    """

    def __init__(self, slots: Slots) -> None:
        self.sums = torch.zeros_like(slots.page_table, dtype=torch.float32)
        self._columns: dict[int, Columns] = {}
        self._reading: _Reading | None = None
        self._steps = 0

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Before a step: take what has arrived, and forget what columns stand no longer for."""
        if not chunks:
            return
        self._steps += 1
        if self._reading is None and self._steps >= READ_STEPS:
            self._read()
        self._take()
        changed = []
        for chunk in chunks:
            slot, sequence = slot_of(chunk.request), chunk.request.sequence
            assert sequence is not None
            columns = sequence, sequence.dropped_pages
            if self._columns.get(slot) != columns:
                self._columns[slot] = columns
                changed.append(slot)
        if changed:
            (rows,) = upload(self.sums.device, np.array(changed, np.int64))
            self.sums.index_fill_(0, rows, 0)

    def add(self, slots: torch.Tensor, shares: torch.Tensor) -> None:
        """Count what a step has found; [B] int64 and [B, up to max_pages] float32."""
        self.sums[:, : shares.shape[1]].index_add_(0, slots, shares)

    def _read(self) -> None:
        """Send the sums to the host, and begin anew."""
        arrived = None
        if self.sums.is_cuda:
            on_host = torch.empty(self.sums.shape, dtype=torch.float32, pin_memory=True)
            sums = on_host.copy_(self.sums, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        else:
            sums = self.sums.clone()
        self._reading = _Reading(sums, dict(self._columns), self._steps, arrived)
        self.sums.zero_()
        self._steps = 0

    def _take(self) -> None:
        reading = self._reading
        if reading is None or (reading.arrived is not None and not reading.arrived.query()):
            return
        self._reading = None
        sums = reading.sums.numpy()
        for slot, (sequence, dropped_pages) in reading.columns.items():
            if sequence.dropped_pages != dropped_pages:
                continue
            found = sums[slot, : len(sequence.pages)]
            pages = np.flatnonzero(found)
            if len(pages):
                found = found[: pages[-1] + 1]
                found = found / found.sum()
                sequence.shares = averaged(sequence.shares, found, reading.steps)


def averaged(before: Sequence[float], found: np.ndarray, steps: int) -> list[float]:
    """The moving average after a measurement; a page's first is its average.

    Args:
        before: Of the leading pages.
        found: Of as many or more.
        steps: That were measured.
    """
    after = found.astype(float)
    known = min(len(before), len(found))
    kept = 0.5 ** (steps / HALF_LIFE_STEPS)
    after[:known] = kept * np.array(before[:known]) + (1 - kept) * after[:known]
    shares: list[float] = after.tolist()
    return shares
