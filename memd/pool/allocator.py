"""Hands out pages, making them free where need be."""

from collections.abc import Callable

from memd.errors import OutOfDeviceMemory, PoolExhausted
from memd.pool.blocks import Blocks
from memd.pool.counters import PoolCounters
from memd.pool.pages import Pages
from memd.pool.residency import Residency
from memd.types import PageId


class Allocator:
    """Takes free pages, and evicts for what is missing.

    Args:
        blocks, pages, residency, counters: Of the pool.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        blocks: Blocks,
        pages: Pages,
        residency: Residency,
        counters: PoolCounters,
        clock: Callable[[], float],
    ) -> None:
        self._blocks = blocks
        self._pages = pages
        self._residency = residency
        self._counters = counters
        self._clock = clock

    @property
    def obtainable_pages(self) -> int:
        """Pages that can be had now: free ones, and cached ones that no copy reads."""
        cached = self._pages.cached - len(self._residency.leaving)
        return max(0, self._blocks.free_pages + max(0, cached))

    def allocate(self, count: int, tenant: int) -> list[PageId]:
        """Take pages that the caller has checked can be had, and charge them to a tenant.

        Raises:
            PoolExhausted: the device has no memory for them after all.
        """
        if not count:
            return []
        started_at = self._clock()
        missing = max(0, count - self._blocks.free_pages)
        if missing:
            self._residency.evict_now(missing, "allocation")
        try:
            pages = self._blocks.take(count)
        except OutOfDeviceMemory as error:
            # Cached pages lie in committed blocks: with enough of them no new block is needed.
            if self._pages.cached - len(self._residency.leaving) < count:
                self._counters.allocations["failed"] += 1
                raise PoolExhausted(f"{count} pages wanted: {error}") from error
            self._residency.evict_now(count, "allocation")
            missing = count
            pages = self._blocks.take(count)
        now = self._clock()
        self._pages.open(pages, now, tenant)
        self._counters.allocations["evicted"] += missing
        self._counters.allocations["free"] += count - missing
        self._counters.allocation_seconds.observe(now - started_at)
        return pages
