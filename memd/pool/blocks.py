"""Free pages by block, and which blocks have memory behind them. Engine thread only."""

from collections.abc import Iterable
from itertools import groupby

from memd.errors import OutOfDeviceMemory, PoolExhausted
from memd.types import BlockBacking, BlockId, PageId


class Blocks:
    """Hands out free pages, fullest block first, so that other blocks drain and can be given back.

    Blocks get memory when their first page is taken. Operations cost O(pages asked for), whatever
    the pool's size: blocks stand in buckets by their number of free pages.

    Args:
        capacity_pages: Pages the pool may hold; the last block may be cut short by it.
        pages_per_block: Pages in a whole block.
        backing: Commits and decommits blocks.
    """

    def __init__(self, capacity_pages: int, pages_per_block: int, backing: BlockBacking) -> None:
        self.capacity_pages = capacity_pages
        self.pages_per_block = pages_per_block
        self.num_blocks = -(-capacity_pages // pages_per_block)
        self.free_pages = capacity_pages
        self.committed_blocks = 0
        self._backing = backing
        self._free: list[list[PageId] | None] = [None] * self.num_blocks  # None: not committed
        self._uncommitted = [BlockId(block) for block in reversed(range(self.num_blocks))]
        self._buckets: list[dict[BlockId, None]] = [{} for _ in range(pages_per_block + 1)]
        self._nonempty = 0  # bit n: some committed block has n free pages; n >= 1

    def take(self, count: int) -> list[PageId]:
        """Take `count` free pages.

        Raises:
            PoolExhausted: fewer are free. Nothing is taken.
            OutOfDeviceMemory: a block could not be committed. Nothing is taken.
        """
        if count > self.free_pages:
            raise PoolExhausted(f"{count} pages wanted, {self.free_pages} free")
        taken: list[PageId] = []
        while len(taken) < count:
            if not self._nonempty:
                try:
                    self._commit_one()
                except OutOfDeviceMemory:
                    self.put(taken)
                    raise
            fullest = (self._nonempty & -self._nonempty).bit_length() - 1
            block, _ = self._buckets[fullest].popitem()
            self._buckets[fullest][block] = None  # popitem, unlike a look, keeps the end compact
            free = self._free[block]
            assert free is not None
            part = free[-(count - len(taken)) :]
            del free[-len(part) :]
            part.reverse()
            taken += part
            self.free_pages -= len(part)
            self._move(block, fullest, len(free))
        return taken

    def put(self, pages: Iterable[PageId]) -> None:
        """Take pages back."""
        for block, run in groupby(pages, key=lambda page: page // self.pages_per_block):
            free = self._free[block]
            assert free is not None
            before = len(free)
            free.extend(run)
            self.free_pages += len(free) - before
            self._move(BlockId(block), before, len(free))

    def decommit_empty(self) -> int:
        """Give the memory of every block without a used page back; returns how many blocks."""
        empty = [
            block
            for block in range(self.num_blocks)
            if (free := self._free[block]) is not None and len(free) == self._size(block)
        ]
        for number in reversed(empty):
            block = BlockId(number)
            self._move(block, self._size(block), 0)
            self._free[block] = None
            self._uncommitted.append(block)
            self.committed_blocks -= 1
            self._backing.decommit(block)
        return len(empty)

    def is_committed(self, block: int) -> bool:
        """Whether a block has memory behind it."""
        return self._free[block] is not None

    def free_page_ids(self) -> set[PageId]:
        """Every free page of committed blocks. O(pages); for the audit."""
        return {page for free in self._free if free for page in free}

    def _size(self, block: int) -> int:
        return min(self.pages_per_block, self.capacity_pages - block * self.pages_per_block)

    def _commit_one(self) -> None:
        block = self._uncommitted[-1]
        self._backing.commit(block)
        self._uncommitted.pop()
        first = block * self.pages_per_block
        pages = [PageId(page) for page in range(first, first + self._size(block))]
        pages.reverse()  # pages are popped from the end: lowest first
        self._free[block] = pages
        self.committed_blocks += 1
        self._move(block, 0, len(pages))

    def _move(self, block: BlockId, old_free: int, new_free: int) -> None:
        if old_free:
            bucket = self._buckets[old_free]
            del bucket[block]
            if not bucket:
                self._nonempty &= ~(1 << old_free)
        if new_free:
            self._buckets[new_free][block] = None
            self._nonempty |= 1 << new_free
