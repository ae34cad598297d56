"""Blocks of device memory in one address range that never moves."""

from dataclasses import dataclass

import torch

from memd.arena.driver import ArenaDriver
from memd.types import BlockId


@dataclass(frozen=True)
class PageShape:
    """Shape of one page in elements: `[num_layers, 2, num_kv_heads, page_tokens, head_dim]`."""

    num_layers: int
    num_kv_heads: int
    page_tokens: int
    head_dim: int


class Arena:
    """Commits and decommits blocks of a reserved range; the memory behind the pool.

    Args:
        driver: Where memory comes from.
        num_blocks: Blocks in the range.
        block_bytes: Size of a block, a multiple of the driver's granule.
    """

    def __init__(self, driver: ArenaDriver, num_blocks: int, block_bytes: int) -> None:
        if block_bytes % driver.granule_bytes:
            raise ValueError(
                f"a block of {block_bytes} bytes is not whole granules of {driver.granule_bytes}"
            )
        self._driver = driver
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes

    def start(self) -> None:
        """Reserve the range. Raises OutOfDeviceMemory."""
        self._driver.reserve(self._num_blocks * self._block_bytes)

    def commit(self, block: BlockId) -> None:
        """Put memory behind a block. Raises OutOfDeviceMemory; then nothing has changed."""
        self._driver.commit(block * self._block_bytes, self._block_bytes)

    def decommit(self, block: BlockId) -> None:
        """Give a block's memory back."""
        self._driver.decommit(block * self._block_bytes, self._block_bytes)

    def settle(self) -> None:
        """Wait until nothing that was enqueued on the device so far still reads or writes."""
        self._driver.settle()

    def bytes(self) -> torch.Tensor:
        """The whole range, uint8 `[size_bytes]`; parts without memory must not be touched."""
        return self._driver.tensor()

    def kv(self, shape: PageShape, pages_per_block: int, dtype: torch.dtype) -> torch.Tensor:
        """All pages as one tensor that aliases the range.

        Shapes:
            `[num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim]`; the
            stride between blocks includes what is left over at a block's end. Index 3: 0 keys, 1
            values.
        """
        return view_pages(self._driver.tensor(), shape, pages_per_block, self._block_bytes, dtype)

    def close(self) -> None:
        """Give the range back; the tensor must not be used afterwards."""
        self._driver.close()


def view_pages(
    memory: torch.Tensor,
    shape: PageShape,
    pages_per_block: int,
    block_bytes: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Full pages of whole blocks, uint8 `[num_blocks * block_bytes]`, as `Arena.kv` gives them."""
    page = (shape.num_layers, 2, shape.num_kv_heads, shape.page_tokens, shape.head_dim)
    strides = [1]
    for size in reversed(page):
        strides.insert(0, strides[0] * size)
    return memory.view(dtype).as_strided(
        (len(memory) // block_bytes, pages_per_block, *page),
        (block_bytes // dtype.itemsize, *strides),
    )
