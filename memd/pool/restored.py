"""Pages that were brought up from lower tiers, and what became of them."""

from collections import Counter
from collections.abc import Iterable

from memd.pool.counters import PoolCounters
from memd.types import PageId, Tier


class Restored:
    """Pages that have arrived on the device and were not used since, by where they came from.

    Args:
        counters: Of the pool.
    """

    def __init__(self, counters: PoolCounters) -> None:
        self.tiers: dict[PageId, Tier] = {}
        self._counters = counters

    def arrived(self, page: PageId, tier: Tier) -> None:
        """A page is on the device again."""
        self.tiers[page] = tier

    def used(self, pages: Iterable[PageId]) -> Counter[Tier]:
        """A sequence holds pages; returns how many of them were brought up for it, by tier."""
        if not self.tiers:
            return Counter()
        found = self.tiers.keys() & set(pages)
        self._counters.prefetched["used"] += len(found)
        return Counter(self.tiers.pop(page) for page in found)

    def overtaken(self, page: PageId) -> None:
        """A sequence computed what a page holds, instead of waiting for it."""
        if self.tiers.pop(page, None) is not None:
            self._counters.prefetched["late"] += 1

    def evicted(self, page: PageId) -> None:
        """A page has gone from the device."""
        if self.tiers.pop(page, None) is not None:
            self._counters.prefetched["wasted"] += 1

    def forgotten(self, page: PageId) -> None:
        """A page has gone with what was before it; that says nothing about fetching ahead."""
        self.tiers.pop(page, None)

    def renamed(self, page: PageId, target: PageId) -> None:
        """The content of a page has moved to another."""
        if page in self.tiers:
            self.tiers[target] = self.tiers.pop(page)
