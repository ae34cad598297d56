"""The order in which cached pages are evicted."""

from array import array

from memd.types import PageId

ABSENT = -1


class LruEviction:
    """Least recently used first, part-filled pages before full ones.

    A part-filled page spares at most a page of prefill and nothing can follow it in the tree, so it
    goes before any full page (cases: vLLM #42656). Callers add the pages of a sequence deepest
    first; with that, a page never stands before a cached descendant, and the victim is always a
    leaf.

    Two linked lists, threaded through arrays by page id: all operations are O(1), and since a
    sequence's pages lie side by side, so do their links, which keeps large pools in the CPU's
    cache.

    Args:
        capacity_pages: Pages in the pool.
    """

    def __init__(self, capacity_pages: int) -> None:
        self._full = capacity_pages  # index of the list's head, beyond all pages
        self._partial = capacity_pages + 1
        self._next = array("i", [ABSENT]) * (capacity_pages + 2)
        self._previous = array("i", [ABSENT]) * (capacity_pages + 2)
        self._last_used_at = array("d", [0.0]) * capacity_pages
        self._count = 0
        for head in (self._full, self._partial):
            self._next[head] = self._previous[head] = head

    def __len__(self) -> int:
        return self._count

    def add(self, page: PageId, partial: bool, now: float) -> None:
        """A page lost its last reference at time `now`; it must not be here."""
        head = self._partial if partial else self._full
        last = self._previous[head]
        self._next[last] = self._previous[head] = page
        self._previous[page] = last
        self._next[page] = head
        self._last_used_at[page] = now
        self._count += 1

    def discard(self, page: PageId) -> None:
        """A page that is here is referenced again, or gone."""
        before, after = self._previous[page], self._next[page]
        assert after != ABSENT
        self._next[before] = after
        self._previous[after] = before
        self._next[page] = ABSENT
        self._count -= 1

    def __contains__(self, page: PageId) -> bool:
        return self._next[page] != ABSENT

    def last_used_at(self, page: PageId) -> float:
        """When a page that is or was here lost its last reference."""
        return self._last_used_at[page]

    def coldest(self, count: int) -> list[PageId]:
        """Up to `count` pages, next victim first. O(count)."""
        pages: list[PageId] = []
        for head in (self._partial, self._full):
            page = self._next[head]
            while page != head and len(pages) < count:
                pages.append(PageId(page))
                page = self._next[page]
        return pages

    def in_order(self) -> list[PageId]:
        """All pages, next victim first. O(n); for the operator and the audit."""
        return self.coldest(self._count)
