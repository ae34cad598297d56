"""What the arena asks of a memory driver."""

from typing import Protocol

import torch


class ArenaDriver(Protocol):
    """Reserves one address range and puts memory behind parts of it.

    Addresses never change between `reserve` and `close`. Engine thread only. The pool keeps which
    parts are committed: it never commits one twice, and decommits what it committed, as a whole.
    """

    @property
    def granule_bytes(self) -> int:
        """Offsets and sizes of commits are multiples of this."""

    @property
    def elastic(self) -> bool:
        """Whether `decommit` gives memory back to the device."""

    def reserve(self, size_bytes: int) -> None:
        """Reserve the range. Called once, before anything else."""

    def commit(self, offset_bytes: int, size_bytes: int) -> None:
        """Put memory behind a part of the range; its content is undefined.

        Raises:
            OutOfDeviceMemory: the device has none left. Nothing has changed.
        """

    def decommit(self, offset_bytes: int, size_bytes: int) -> None:
        """Take the memory behind a committed part away; nothing on the device reads it any more."""

    def settle(self) -> None:
        """Wait until the work enqueued on the device so far has ended."""

    def tensor(self) -> torch.Tensor:
        """The whole range, uint8 `[size_bytes]`. Parts without memory must not be touched."""

    def close(self) -> None:
        """Give everything back. No tensor over the range may be used afterwards."""
