"""A copier around another one, with faults on demand. For tests and debugging."""

from collections import deque
from collections.abc import Callable, Sequence

import torch

from memd.faults import Faults
from memd.pool.layout import KVLayout
from memd.pool.moves import Transfer
from memd.tiers.copier import Copier
from memd.types import TransferId


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
