"""An arena driver around another one, with faults on demand. For tests and debugging."""

import torch

from memd.arena.driver import ArenaDriver
from memd.errors import OutOfDeviceMemory
from memd.faults import Faults


class FaultyDriver:
    """Checks every call against the protocol, and refuses the commits it is told to refuse.

    Where free pages are to hold NaN, so does memory that is new: a kernel that reads what nobody
    wrote is found out.

    Args:
        inner: Where memory comes from.
        faults: What to do.
    """

    def __init__(self, inner: ArenaDriver, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._committed: dict[int, int] = {}  # offset -> size
        self._reserved_bytes = 0

    @property
    def granule_bytes(self) -> int:
        return self._inner.granule_bytes

    @property
    def elastic(self) -> bool:
        return self._inner.elastic

    def reserve(self, size_bytes: int) -> None:
        if self._reserved_bytes or size_bytes <= 0 or size_bytes % self.granule_bytes:
            raise ValueError(f"reserve({size_bytes}): twice, or not whole granules")
        self._inner.reserve(size_bytes)
        self._reserved_bytes = size_bytes

    def commit(self, offset_bytes: int, size_bytes: int) -> None:
        self._check(offset_bytes, size_bytes)
        if any(
            offset_bytes < offset + size and offset < offset_bytes + size_bytes
            for offset, size in self._committed.items()
        ):
            raise ValueError(f"commit of {offset_bytes}+{size_bytes} overlaps a committed part")
        if self._faults.commit_fails():
            raise OutOfDeviceMemory(f"the commit of {offset_bytes}+{size_bytes} was told to fail")
        self._inner.commit(offset_bytes, size_bytes)
        self._committed[offset_bytes] = size_bytes
        if self._faults.plan.nan_in_free_pages:
            # All bits set is NaN in every format.
            self.tensor()[offset_bytes : offset_bytes + size_bytes] = 255

    def decommit(self, offset_bytes: int, size_bytes: int) -> None:
        self._check(offset_bytes, size_bytes)
        if self._committed.get(offset_bytes) != size_bytes:
            raise ValueError(f"decommit of {offset_bytes}+{size_bytes}, which was not committed")
        del self._committed[offset_bytes]
        self._inner.decommit(offset_bytes, size_bytes)

    def settle(self) -> None:
        self._inner.settle()

    def tensor(self) -> torch.Tensor:
        return self._inner.tensor()

    def close(self) -> None:
        self._inner.close()

    def _check(self, offset_bytes: int, size_bytes: int) -> None:
        if offset_bytes % self.granule_bytes or size_bytes % self.granule_bytes or size_bytes <= 0:
            raise ValueError(f"{offset_bytes}+{size_bytes} is not in whole granules")
        if not 0 <= offset_bytes <= self._reserved_bytes - size_bytes:
            raise ValueError(f"{offset_bytes}+{size_bytes} is outside the range")
