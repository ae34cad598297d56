"""Hands out pages, making them free where need be."""

from collections.abc import Callable, Sequence

from memd.errors import OutOfDeviceMemory, PoolExhausted
from memd.pool.blocks import Blocks
from memd.pool.counters import PoolCounters
from memd.pool.pages import Pages
from memd.pool.relocate import Relocator
from memd.pool.residency import Residency
from memd.types import PageId


class Allocator:
    """Takes free pages, and evicts for what is missing.

    Where what is evicted was packed, the packed pages that stay are moved together until enough
    blocks are empty.

    Args:
        blocks, pages, residency, relocator, counters: Of the pool.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        blocks: Blocks,
        pages: Pages,
        residency: Residency,
        relocator: Relocator,
        counters: PoolCounters,
        clock: Callable[[], float],
    ) -> None:
        self._blocks = blocks
        self._pages = pages
        self._residency = residency
        self._relocator = relocator
        self._counters = counters
        self._clock = clock

    def obtainable_pages(self, kept: Sequence[PageId] = ()) -> int:
        """Full pages that can be had now: free ones, cached ones that no copy reads, and those of
        packed blocks that would be empty if cached pages went and the others lay together.

        Args:
            kept: Pages that must stay.
        """
        blocks = self._blocks
        full, packed = self._evictable(kept)
        emptied = self._emptied_blocks(packed) * blocks.pages_per_block
        return max(0, blocks.free_full_pages + full + emptied)

    def obtainable_packed_pages(self, kept: Sequence[PageId] = ()) -> int:
        """Packed pages that can be had at most: it is not known before what is in the way.

        Args:
            kept: Pages that must stay.
        """
        blocks = self._blocks
        full, packed = self._evictable(kept)
        more = max(0, blocks.free_full_pages + full) // blocks.pages_per_block
        return blocks.free_packed_pages + packed + more * blocks.packed_pages_per_block

    def allocate(self, count: int, tenant: int, held: list[PageId] | None = None) -> list[PageId]:
        """Take full pages that the caller has checked can be had, and charge them to a tenant.

        Args:
            held: Pages that the caller holds a reference to each of; renamed if they move.

        Raises:
            PoolExhausted: the device has no memory for them after all, or could not move pages.
        """
        if not count:
            return []
        started_at, blocks = self._clock(), self._blocks
        evicted = self._make_free(count, lambda: blocks.free_full_pages, held)
        try:
            pages = blocks.take(count)
        except OutOfDeviceMemory as error:
            # Cached pages lie in committed blocks: with enough of them no new block is needed.
            beyond = blocks.free_full_pages - blocks.committed_full_pages
            if self.obtainable_pages() - beyond < count:
                self._counters.allocations["failed"] += 1
                raise PoolExhausted(f"{count} pages wanted: {error}") from error
            evicted += self._make_free(count, lambda: blocks.committed_full_pages, held)
            pages = blocks.take(count)
        self._open(pages, tenant, min(evicted, count), started_at)
        return pages

    def allocate_packed(
        self, count: int, tenant: int, held: list[PageId] | None = None
    ) -> list[PageId]:
        """Take packed pages, and charge them to a tenant.

        Args:
            held: See `allocate`.

        Raises:
            PoolExhausted: they cannot be had now.
        """
        if not count:
            return []
        started_at, blocks, evicted = self._clock(), self._blocks, 0
        while count > blocks.obtainable_packed_pages:
            if self._empty_full_block(held):
                continue
            gone = self._residency.evict_now(count - blocks.obtainable_packed_pages, "allocation")
            if not gone:
                raise PoolExhausted(f"{count} packed pages wanted, blocks for them are in use")
            evicted += gone
        try:
            pages = blocks.take_packed(count)
        except OutOfDeviceMemory as error:
            raise PoolExhausted(f"{count} packed pages wanted: {error}") from error
        self._open(pages, tenant, min(evicted, count), started_at)
        return pages

    def full_pages_for(self, packed_pages: int) -> int:
        """Full pages that have to be free for blocks that become packed for so many packed ones."""
        blocks = self._blocks
        missing = packed_pages - blocks.free_packed_pages
        if missing <= 0:
            return 0
        return -(-missing // blocks.packed_pages_per_block) * blocks.pages_per_block

    def make_room(self, num_pages: int, kept: list[PageId]) -> bool:
        """See to it that full pages are free in the next steps; see `Residency.make_room`.

        Args:
            num_pages: Full pages about to be allocated.
            kept: Cached pages that must not go for them; renamed if they move.

        Raises:
            PoolExhausted: pages could not be moved together.
        """
        blocks = self._blocks
        while True:
            if self._residency.host.room:
                self._gather_packed(num_pages, kept)
            used, packed = blocks.used_pages, blocks.packed_blocks
            if self._residency.make_room(num_pages, kept):
                return True
            # Packed pages that went at once leave no full ones: others have to follow now.
            if not packed or blocks.used_pages == used:
                return False

    def make_packed_room(self, count: int) -> int:
        """See to it that full pages can be packed; returns how many can.

        Nothing is evicted for it, unless it makes more pages free at once than were evicted.

        Raises:
            PoolExhausted: pages could not be moved together.
        """
        blocks = self._blocks
        while (short := count - blocks.obtainable_packed_pages) > 0:
            if self._empty_full_block(None):
                continue
            size, free = blocks.pages_per_block, blocks.free_full_pages
            missing = (max(0, free) // size + 1) * size - free
            evictable, _ = self._evictable(())
            if not 0 < missing <= min(short, evictable):
                break
            if not self._residency.evict_now(missing, "allocation"):
                break
        return min(count, blocks.obtainable_packed_pages)

    def _gather_packed(self, num_pages: int, kept: list[PageId]) -> int:
        """Move packed pages together, if so many full pages are not free; see `make_room`."""
        missing = num_pages - self._blocks.free_full_pages
        if missing <= 0 or not self._emptied_blocks(0):
            return 0
        self._pages.hold(kept)
        try:
            return self._empty_packed_blocks(missing, kept)
        finally:
            self._blocks.put(self._pages.drop(kept[::-1], self._clock()))

    def _make_free(self, count: int, free: Callable[[], int], held: list[PageId] | None) -> int:
        """Move and evict until so many full pages are free; returns how many were evicted."""
        evicted = 0
        while (missing := count - free()) > 0:
            if self._empty_packed_blocks(missing, held):
                continue
            gone = self._residency.evict_now(missing, "allocation")
            if not gone:
                raise PoolExhausted(f"{count} pages wanted, {missing} could not be made free")
            evicted += gone
        return evicted

    def _evictable(self, kept: Sequence[PageId]) -> tuple[int, int]:
        """Full and packed pages that can be evicted now, but for some that must stay."""
        pages, blocks, residency = self._pages, self._blocks, self._residency
        staying = [page for page in kept if pages.is_cached(page)]
        packed_staying = blocks.count_packed(staying)
        packed_leaving = sum(1 for each in residency.moving_packed.values() if each.path == "d2h")
        full_leaving = len(residency.leaving) - packed_leaving
        full = pages.cached - pages.cached_packed - full_leaving
        packed = pages.cached_packed - packed_leaving
        return (
            max(0, full) - (len(staying) - packed_staying),
            max(0, packed - packed_staying),
        )

    def _emptied_blocks(self, evicted_pages: int) -> int:
        """Packed blocks that would hold nothing if pages were evicted and the others lay together.

        A block with a page that is being copied between tiers counts as one that stays as it is.
        """
        blocks, moving = self._blocks, self._residency.moving_packed.values()
        if not blocks.packed_blocks:
            return 0
        stay = len({each.page // blocks.slots_per_block for each in moving})
        others = blocks.packed_pages - evicted_pages - len(moving)
        return max(0, blocks.packed_blocks - stay - -(-others // blocks.packed_pages_per_block))

    def _empty_packed_blocks(self, missing_pages: int, held: list[PageId] | None) -> int:
        """Move packed pages together for so many full pages, as far as that is enough for a block;
        returns how many blocks are empty now that were not.
        """
        wanted = -(-missing_pages // self._blocks.pages_per_block)
        count = min(wanted, self._emptied_blocks(0))
        return self._relocator.empty_blocks(True, count, held) if count else 0

    def _empty_full_block(self, held: list[PageId] | None) -> int:
        """Move full pages together for a block that may become packed; returns 1 if there is one
        that was not. None is needed while full pages for it are missing.
        """
        blocks = self._blocks
        if blocks.free_full_pages < blocks.pages_per_block * (1 + blocks.unused_blocks):
            return 0
        return self._relocator.empty_blocks(False, 1, held)

    def _open(self, pages: list[PageId], tenant: int, evicted: int, started_at: float) -> None:
        now = self._clock()
        self._pages.open(pages, now, tenant)
        self._counters.allocations["evicted"] += evicted
        self._counters.allocations["free"] += len(pages) - evicted
        self._counters.allocation_seconds.observe(now - started_at)
