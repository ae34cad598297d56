"""Free pages by block, and which blocks have memory behind them. Engine thread only.

The limit counts pages, it names none: any block of the range may have memory, as long as no more
blocks have it than the limit needs. So a pool that shrinks moves as few pages as can be.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import groupby, islice

from memd.errors import OutOfDeviceMemory, PoolExhausted
from memd.types import BlockBacking, BlockId, PageId


class Blocks:
    """Hands out free pages, fullest block first, so that other blocks drain and can be given back.

    Blocks get memory when their first page is taken, or ahead of it. Operations cost O(pages asked
    for), whatever the pool's size: blocks stand in buckets by their number of free pages.

    Args:
        limit_pages: Most pages in use; see `set_limit`.
        pages_per_block: Pages in a block.
        backing: Commits and decommits blocks.
        clock: Monotonic seconds.

    Attributes:
        used_pages: Taken and not put back. Above a limit that was lowered nothing can be taken.
        empty_since: Blocks with memory that hold nothing, and since when; longest empty first.
        commits: Blocks that ever got memory.
    """

    def __init__(
        self,
        limit_pages: int,
        pages_per_block: int,
        backing: BlockBacking,
        clock: Callable[[], float],
    ) -> None:
        self.limit_pages = 0
        self.pages_per_block = pages_per_block
        self.used_pages = 0
        self.committed_blocks = 0
        self.commits = 0
        self.empty_since: dict[BlockId, float] = {}
        self._backing = backing
        self._clock = clock
        self._free: list[list[PageId] | None] = []  # None: not committed
        self._uncommitted: list[BlockId] = []  # a heap: lowest first
        self._buckets: list[dict[BlockId, None]] = [{} for _ in range(pages_per_block + 1)]
        self._nonempty = 0  # bit n: some committed block has n free pages; n >= 1
        self.set_limit(limit_pages)

    @property
    def free_pages(self) -> int:
        """Pages that can be taken; below 0: how far a lowered limit is exceeded."""
        return self.limit_pages - self.used_pages

    @property
    def limit_blocks(self) -> int:
        """Most blocks with memory, once a lowered limit is kept."""
        return -(-self.limit_pages // self.pages_per_block)

    @property
    def room_pages(self) -> int:
        """Page ids there are: those of every block that the limit has ever covered."""
        return len(self._free) * self.pages_per_block

    @property
    def num_blocks(self) -> int:
        """Blocks that have memory or may get it, by position; above the limit none that has not."""
        last = len(self._free)
        while last > self.limit_blocks and self._free[last - 1] is None:
            last -= 1
        return last

    @property
    def used_blocks(self) -> int:
        """Blocks that hold something."""
        return self.committed_blocks - len(self.empty_since)

    @property
    def surplus_blocks(self) -> int:
        """Blocks that hold something, and would not if pages lay as densely as they can."""
        return self.used_blocks - -(-self.used_pages // self.pages_per_block)

    @property
    def fragmentation(self) -> float:
        """Share of the blocks that hold something which moving pages together would empty.

        That is the share of their room which holds nothing, but for the room that the last block of
        the densest order would leave. Blocks that are empty already do not count.
        """
        return self.surplus_blocks / self.used_blocks if self.used_blocks else 0.0

    def set_limit(self, limit_pages: int) -> None:
        """Another limit; a lower one takes nothing away."""
        self.limit_pages = limit_pages
        while len(self._free) < self.limit_blocks:
            heappush(self._uncommitted, BlockId(len(self._free)))
            self._free.append(None)

    def take(self, count: int) -> list[PageId]:
        """Take `count` free pages.

        Raises:
            PoolExhausted: fewer are free. Nothing is taken.
            OutOfDeviceMemory: a block could not be committed. Nothing is taken.
        """
        if count > self.free_pages:
            raise PoolExhausted(f"{count} pages wanted, {max(0, self.free_pages)} free")
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
            self.used_pages += len(part)
            self._move(block, fullest, len(free))
        return taken

    def take_these(self, pages: Iterable[PageId]) -> None:
        """Take free pages of committed blocks by name. O(pages per block) each."""
        for page in pages:
            block = BlockId(page // self.pages_per_block)
            free = self._free[block]
            assert free is not None
            free.remove(page)
            self.used_pages += 1
            self._move(block, len(free) + 1, len(free))

    def put(self, pages: Iterable[PageId]) -> None:
        """Take pages back."""
        for block, run in groupby(pages, key=lambda page: page // self.pages_per_block):
            free = self._free[block]
            assert free is not None
            before = len(free)
            free.extend(run)
            self.used_pages -= len(free) - before
            self._move(BlockId(block), before, len(free))

    def commit_ahead(self, count: int) -> int:
        """Put memory behind up to `count` blocks more, within the limit; returns how many.

        Raises:
            OutOfDeviceMemory: the device has none left; those before have it.
        """
        count = max(0, min(count, self.limit_blocks - self.committed_blocks))
        for _ in range(count):
            self._commit_one()
        return count

    def decommit_empty(
        self, count: int | None = None, emptied_before: float = math.inf, wait: bool = True
    ) -> int:
        """Give the memory of blocks that hold nothing back, longest empty first.

        Args:
            count: Most of them; None: all.
            emptied_before: Monotonic seconds; those that became empty since then stay.
            wait: For the device, which may still read what they held. False: the caller knows that
                all work enqueued before `emptied_before` has ended.

        Returns:
            How many blocks.
        """
        longest = islice(self.empty_since.items(), count)
        going = [block for block, since in longest if since < emptied_before]
        if going and wait:
            self.settle()
        for block in going:
            self._move(block, self.pages_per_block, 0)
            self._free[block] = None
            heappush(self._uncommitted, block)
            self.committed_blocks -= 1
            self._backing.decommit(block)
        return len(going)

    def settle(self) -> None:
        """Wait for what the device has to do now, which may read pages that are free already."""
        self._backing.settle()

    def is_committed(self, block: int) -> bool:
        """Whether a block has memory behind it."""
        return self._free[block] is not None

    def free_page_ids(self) -> set[PageId]:
        """Every free page of committed blocks. O(pages); for the audit."""
        return {page for free in self._free if free for page in free}

    def free_in(self, block: BlockId) -> list[PageId]:
        """The free pages of a committed block."""
        return list(self._free[block] or ())

    def used_in(self, block: BlockId) -> list[PageId]:
        """The pages of a committed block that are not free."""
        free, first = set(self._free[block] or ()), block * self.pages_per_block
        pages = range(first, first + self.pages_per_block)
        return [PageId(page) for page in pages if page not in free]

    def partly_used(self, emptiest_first: bool) -> Iterator[BlockId]:
        """Blocks that hold something and have room, by how much. Not to be changed meanwhile."""
        order = range(1, self.pages_per_block)
        for free in reversed(order) if emptiest_first else order:
            yield from self._buckets[free]

    def _commit_one(self) -> None:
        block = self._uncommitted[0]
        self._backing.commit(block)
        heappop(self._uncommitted)
        first = block * self.pages_per_block
        pages = [PageId(page) for page in range(first, first + self.pages_per_block)]
        pages.reverse()  # pages are popped from the end: lowest first
        self._free[block] = pages
        self.committed_blocks += 1
        self.commits += 1
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
        if old_free == self.pages_per_block:
            del self.empty_since[block]
        if new_free == self.pages_per_block:
            self.empty_since[block] = self._clock()
