"""An arena driver with faults on demand, over plain host memory. For tests and debugging."""

import torch

from memd.errors import OutOfDeviceMemory


class FakeDriver:
    """Checks every call against the protocol and fails the commits it is told to fail.

    Committed parts are filled with NaN (all bits set), so that a kernel that reads what nobody
    wrote is found out; so are decommitted ones.

    Args:
        granule_bytes: Reported granule.
        fail_commits: Ordinals of the commits to refuse, from 0.
    """

    elastic = True

    def __init__(
        self, granule_bytes: int = 4096, fail_commits: frozenset[int] = frozenset()
    ) -> None:
        self.granule_bytes = granule_bytes
        self.fail_commits = fail_commits
        self.num_commits = 0
        self.committed: dict[int, int] = {}  # offset -> size
        self._memory: torch.Tensor | None = None

    def reserve(self, size_bytes: int) -> None:
        if self._memory is not None or size_bytes <= 0 or size_bytes % self.granule_bytes:
            raise ValueError(f"reserve({size_bytes}): twice, or not whole granules")
        self._memory = torch.full((size_bytes,), 255, dtype=torch.uint8)

    def commit(self, offset_bytes: int, size_bytes: int) -> None:
        ordinal = self.num_commits
        self.num_commits += 1
        self._check(offset_bytes, size_bytes)
        if any(
            offset_bytes < offset + size and offset < offset_bytes + size_bytes
            for offset, size in self.committed.items()
        ):
            raise ValueError(f"commit of {offset_bytes}+{size_bytes} overlaps a committed part")
        if ordinal in self.fail_commits:
            raise OutOfDeviceMemory(f"commit {ordinal} told to fail")
        self.committed[offset_bytes] = size_bytes

    def decommit(self, offset_bytes: int, size_bytes: int) -> None:
        self._check(offset_bytes, size_bytes)
        if self.committed.get(offset_bytes) != size_bytes:
            raise ValueError(f"decommit of {offset_bytes}+{size_bytes}, which was not committed")
        del self.committed[offset_bytes]
        self.tensor()[offset_bytes : offset_bytes + size_bytes] = 255

    def tensor(self) -> torch.Tensor:
        if self._memory is None:
            raise ValueError("nothing is reserved")
        return self._memory

    def close(self) -> None:
        self._memory = None

    def _check(self, offset_bytes: int, size_bytes: int) -> None:
        if offset_bytes % self.granule_bytes or size_bytes % self.granule_bytes or size_bytes <= 0:
            raise ValueError(f"{offset_bytes}+{size_bytes} is not in whole granules")
        if not 0 <= offset_bytes <= self.tensor().numel() - size_bytes:
            raise ValueError(f"{offset_bytes}+{size_bytes} is outside the range")
