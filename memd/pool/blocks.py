"""Free pages by block, and which blocks have memory behind them. Engine thread only.

The limit counts pages, it names none: any block of the range may have memory, as long as no more
blocks have it than the limit needs. So a pool that shrinks moves as few pages as can be.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import groupby, islice

from memd.errors import OutOfDeviceMemory, PoolExhausted
from memd.pool.buckets import Buckets
from memd.types import BlockBacking, BlockId, PageId


class Blocks:
    """Hands out free pages, fullest block first, so that other blocks drain and can be given back.

    Blocks get memory when their first page is taken, or ahead of it. Operations cost O(pages asked
    for), whatever the pool's size: blocks stand in buckets by their number of free pages.

    A block holds full pages or packed ones. One that holds nothing may become either; till then its
    free pages count as full ones. A packed block takes the room of a block of full pages from the
    limit, so all free pages in it are there to be taken.

    Args:
        limit_pages: Most full pages in use, where no block is packed; see `set_limit`.
        pages_per_block: Full pages in a block.
        backing: Commits and decommits blocks.
        clock: Monotonic seconds.
        packed_pages_per_block: Packed pages in a block; 0: there are none.

    Attributes:
        full_pages: Taken and not put back. Above a limit that was lowered nothing can be
            taken.
        packed_pages: The same of packed pages.
        packed_blocks: Blocks that hold packed pages.
        empty_since: Blocks with memory that hold nothing, and since when; longest empty first.
        commits: Blocks that ever got memory.
    """

    def __init__(
        self,
        limit_pages: int,
        pages_per_block: int,
        backing: BlockBacking,
        clock: Callable[[], float],
        packed_pages_per_block: int = 0,
    ) -> None:
        self.limit_pages = 0
        self.pages_per_block = pages_per_block
        self.packed_pages_per_block = packed_pages_per_block
        self.slots_per_block = max(pages_per_block, packed_pages_per_block)
        self.full_pages = 0
        self.packed_pages = 0
        self.packed_blocks = 0
        self.committed_blocks = 0
        self.commits = 0
        self.empty_since: dict[BlockId, float] = {}
        self._backing = backing
        self._clock = clock
        self._free: list[list[PageId] | None] = []  # None: not committed
        self._packed = bytearray()  # by block: 1 if it holds packed pages
        self._uncommitted: list[BlockId] = []  # a heap: lowest first
        self._full_room = Buckets(pages_per_block)  # of full blocks, and of those without a format
        self._packed_room = Buckets(packed_pages_per_block)
        self.set_limit(limit_pages)

    @property
    def used_pages(self) -> int:
        """Pages of either format that are taken and not put back."""
        return self.full_pages + self.packed_pages

    @property
    def taken_pages(self) -> int:
        """What full pages and packed blocks take of the limit, in full pages."""
        return self.full_pages + self.packed_blocks * self.pages_per_block

    @property
    def free_full_pages(self) -> int:
        """Full pages that can be taken; below 0: how far a lowered limit is exceeded."""
        return self.limit_pages - self.taken_pages

    @property
    def free_packed_pages(self) -> int:
        """Packed pages that can be taken from blocks that are packed already."""
        return self.packed_blocks * self.packed_pages_per_block - self.packed_pages

    @property
    def obtainable_packed_pages(self) -> int:
        """Packed pages that can be taken, with blocks that may become packed for them."""
        blocks = min(self.unused_blocks, self.free_full_pages // self.pages_per_block)
        return self.free_packed_pages + max(0, blocks) * self.packed_pages_per_block

    @property
    def unused_blocks(self) -> int:
        """Blocks that hold nothing, and those that may still be committed."""
        return len(self.empty_since) + max(0, self.limit_blocks - self.committed_blocks)

    @property
    def committed_full_pages(self) -> int:
        """Full pages that are free and have memory."""
        blocks = self.committed_blocks - self.packed_blocks
        return blocks * self.pages_per_block - self.full_pages

    @property
    def capacity_pages(self) -> int:
        """Places for pages within the limit, as the blocks are cut now."""
        more = self.packed_pages_per_block - self.pages_per_block
        return self.limit_pages + self.packed_blocks * more

    @property
    def limit_blocks(self) -> int:
        """Most blocks with memory, once a lowered limit is kept."""
        return -(-self.limit_pages // self.pages_per_block)

    @property
    def room_pages(self) -> int:
        """Page ids there are: those of every block that the limit has ever covered."""
        return len(self._free) * self.slots_per_block

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
        return self.surplus_full_blocks + self.surplus_packed_blocks

    @property
    def surplus_full_blocks(self) -> int:
        """The same, of the blocks that hold full pages."""
        used = self.used_blocks - self.packed_blocks
        return used - -(-self.full_pages // self.pages_per_block)

    @property
    def surplus_packed_blocks(self) -> int:
        """The same, of the packed blocks."""
        if not self.packed_blocks:
            return 0
        return self.packed_blocks - -(-self.packed_pages // self.packed_pages_per_block)

    @property
    def fragmentation(self) -> float:
        """Share of the blocks that hold something which moving pages together would empty.

        That is the share of their room which holds nothing, but for the room that the last block of
        the densest order would leave. Blocks that are empty already do not count.
        """
        return self.surplus_blocks / self.used_blocks if self.used_blocks else 0.0

    def is_packed(self, page: PageId) -> bool:
        """Whether a page that is not free is a packed one."""
        return self.packed_blocks > 0 and self._packed[page // self.slots_per_block] == 1

    def is_packed_block(self, block: int) -> bool:
        """Whether a block holds packed pages."""
        return self._packed[block] == 1

    def pages_in(self, block: int) -> int:
        """Pages that a block holds when no place in it is free, of the format it has now."""
        return self.packed_pages_per_block if self._packed[block] else self.pages_per_block

    def count_packed(self, pages: Iterable[PageId]) -> int:
        """How many of some pages are packed ones."""
        if not self.packed_blocks:
            return 0
        packed, size = self._packed, self.slots_per_block
        return sum(packed[page // size] for page in pages)

    def set_limit(self, limit_pages: int) -> None:
        """Another limit; a lower one takes nothing away."""
        self.limit_pages = limit_pages
        while len(self._free) < self.limit_blocks:
            heappush(self._uncommitted, BlockId(len(self._free)))
            self._free.append(None)
            self._packed.append(0)

    def take(self, count: int) -> list[PageId]:
        """Take `count` free full pages.

        Raises:
            PoolExhausted: fewer are free. Nothing is taken.
            OutOfDeviceMemory: a block could not be committed. Nothing is taken.
        """
        if count > self.free_full_pages:
            raise PoolExhausted(f"{count} pages wanted, {max(0, self.free_full_pages)} free")
        taken: list[PageId] = []
        while len(taken) < count:
            block = self._full_room.fullest()
            if block is None:
                self._commit_for(taken)
                continue
            before, part = self._take_from(block, count - len(taken))
            taken += part
            self.full_pages += len(part)
            self._move(block, before, before - len(part))
        return taken

    def take_packed(self, count: int) -> list[PageId]:
        """Take `count` free packed pages: from packed blocks, then from blocks that become packed.

        Raises:
            PoolExhausted: fewer can be had so. Nothing is taken.
            OutOfDeviceMemory: a block could not be committed. Nothing is taken.
        """
        if count > self.obtainable_packed_pages:
            raise PoolExhausted(
                f"{count} packed pages wanted, {self.obtainable_packed_pages} can be had"
            )
        taken: list[PageId] = []
        while len(taken) < count:
            block = self._packed_room.fullest()
            if block is None:
                self._open_packed(taken)
                continue
            before, part = self._take_from(block, count - len(taken))
            taken += part
            self.packed_pages += len(part)
            self._packed_room.move(block, before, before - len(part))
        return taken

    def take_these(self, pages: Iterable[PageId]) -> None:
        """Take free pages of blocks that hold something by name. O(pages per block) each."""
        for page in pages:
            block = BlockId(page // self.slots_per_block)
            free = self._free[block]
            assert free is not None
            free.remove(page)
            if self._packed[block]:
                self.packed_pages += 1
                self._packed_room.move(block, len(free) + 1, len(free))
            else:
                self.full_pages += 1
                self._move(block, len(free) + 1, len(free))

    def put(self, pages: Iterable[PageId]) -> None:
        """Take pages of either format back."""
        for block, run in groupby(pages, key=lambda page: page // self.slots_per_block):
            free = self._free[block]
            assert free is not None
            before = len(free)
            free.extend(run)
            if self._packed[block]:
                self._put_packed(BlockId(block), before, len(free))
            else:
                self.full_pages -= len(free) - before
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
        free = set(self._free[block] or ())
        pages = self._pages_of(block, self.is_packed_block(block))
        return [page for page in reversed(pages) if page not in free]

    def partly_used(self, emptiest_first: bool, packed: bool = False) -> Iterator[BlockId]:
        """Blocks of a format that hold something and have room, by how much. Not to be changed
        meanwhile.
        """
        return (self._packed_room if packed else self._full_room).partly_used(emptiest_first)

    def _take_from(self, block: BlockId, count: int) -> tuple[int, list[PageId]]:
        """Up to `count` free pages of a block, and how many it had."""
        free = self._free[block]
        assert free is not None
        before, part = len(free), free[-count:]
        del free[-len(part) :]
        part.reverse()
        return before, part

    def _commit_for(self, taken: list[PageId]) -> None:
        """Commit a block; where that fails, pages already taken are put back."""
        try:
            self._commit_one()
        except OutOfDeviceMemory:
            self.put(taken)
            raise

    def _commit_one(self) -> None:
        block = self._uncommitted[0]
        self._backing.commit(block)
        heappop(self._uncommitted)
        self._free[block] = self._pages_of(block, packed=False)
        self.committed_blocks += 1
        self.commits += 1
        self._move(block, 0, self.pages_per_block)

    def _pages_of(self, block: BlockId, packed: bool) -> list[PageId]:
        """Every page of a block of a format, highest first: they are taken from the end."""
        count = self.packed_pages_per_block if packed else self.pages_per_block
        first = block * self.slots_per_block
        return [PageId(page) for page in range(first + count - 1, first - 1, -1)]

    def _open_packed(self, taken: list[PageId]) -> None:
        """Make a block that holds nothing a packed one, for the pages to be taken next."""
        block = self._full_room.empty()
        if block is None:
            self._commit_for(taken)
            block = self._full_room.empty()
            assert block is not None
        self._move(block, self.pages_per_block, 0)
        self._free[block] = self._pages_of(block, packed=True)
        self._packed[block] = 1
        self.packed_blocks += 1
        self._packed_room.move(block, 0, self.packed_pages_per_block)

    def _put_packed(self, block: BlockId, old_free: int, new_free: int) -> None:
        """A packed block has more free pages; one that holds nothing has no format any more."""
        self.packed_pages -= new_free - old_free
        if new_free < self.packed_pages_per_block:
            self._packed_room.move(block, old_free, new_free)
            return
        self._packed_room.move(block, old_free, 0)
        self._free[block] = self._pages_of(block, packed=False)
        self._packed[block] = 0
        self.packed_blocks -= 1
        self._move(block, 0, self.pages_per_block)

    def _move(self, block: BlockId, old_free: int, new_free: int) -> None:
        """A block of full pages, or of none, has another number of free pages; 0: it is left out of
        the buckets.
        """
        self._full_room.move(block, old_free, new_free)
        if old_free == self.pages_per_block:
            del self.empty_since[block]
        if new_free == self.pages_per_block:
            self.empty_since[block] = self._clock()
