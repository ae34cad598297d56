"""Host memory as an arena: anonymous mmap, given back page by page with madvise."""

import mmap
import sys
from contextlib import suppress

import torch

from memd.errors import OutOfDeviceMemory

# In the module from Python 3.13 on.
_NORESERVE = 0x4000 if sys.platform == "linux" else getattr(mmap, "MAP_NORESERVE", 0)


class CpuDriver:
    """The driver for engines that run on the CPU.

    The kernel puts memory behind a part when it is first written, so `commit` has nothing to do.
    """

    granule_bytes = mmap.PAGESIZE
    elastic = True

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None

    def reserve(self, size_bytes: int) -> None:
        try:
            # Otherwise a process that reserves as much as the machine has could not fork.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            self._map = mmap.mmap(-1, size_bytes, flags=flags)
        except OSError as error:
            raise OutOfDeviceMemory(f"cannot reserve {size_bytes} bytes: {error}") from error
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)  # attention misses fewer translations

    def commit(self, offset_bytes: int, size_bytes: int) -> None:
        pass

    def decommit(self, offset_bytes: int, size_bytes: int) -> None:
        assert self._map is not None
        self._map.madvise(mmap.MADV_DONTNEED, offset_bytes, size_bytes)

    def settle(self) -> None:
        pass

    def tensor(self) -> torch.Tensor:
        assert self._map is not None
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        # Tensors over the map keep it alive; the kernel takes it back with the last of them.
        self._map = None
