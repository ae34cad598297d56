"""One allocation for the whole arena, where the driver lacks virtual memory."""

import torch

from memd.errors import OutOfDeviceMemory


class SingleAllocationDriver:
    """Takes all memory at once from torch's allocator and gives none back before `close`.

    Args:
        device: Where the memory is.
    """

    granule_bytes = 2 * 2**20
    elastic = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None

    def reserve(self, size_bytes: int) -> None:
        try:
            self._memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(f"cannot allocate {size_bytes} bytes: {error}") from error

    def commit(self, offset_bytes: int, size_bytes: int) -> None:
        pass

    def decommit(self, offset_bytes: int, size_bytes: int) -> None:
        pass

    def settle(self) -> None:
        pass

    def tensor(self) -> torch.Tensor:
        assert self._memory is not None
        return self._memory

    def close(self) -> None:
        self._memory = None
