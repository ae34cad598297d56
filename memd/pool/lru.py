"""The order in which cached pages are evicted."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import chain, islice

from memd.types import PageId

ABSENT = -1


class LruEviction:
    """Least recently used first, part-filled pages before full ones.

    A part-filled page spares at most a page of prefill and nothing can follow it in the tree, so it
    goes before any full page (cases: vLLM #42656). Callers add the pages of a sequence deepest
    first; with that, a page never stands before a cached descendant, and the victim is always a
    leaf.

    Pages stand in lanes, so that those of a tenant above its quota can go first; the lanes are
    merged by the time of last use. A lane is two linked lists, threaded through arrays by page id:
    adding and removing are O(1), and since a sequence's pages lie side by side, so do their links,
    which keeps large pools in the CPU's cache.

    Args:
        capacity_pages: Pages in the pool.
    """

    def __init__(self, capacity_pages: int) -> None:
        self._capacity = capacity_pages
        self._last_used_at = array("d", [0.0]) * capacity_pages
        self._clear(lanes=1)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, page: PageId) -> bool:
        return self._next[page] != ABSENT

    def add(self, page: PageId, partial: bool, now: float, lane: int = 0) -> None:
        """A page lost its last reference or pin at time `now`; it must not be here."""
        self._append(page, self._head(lane, partial))
        self._last_used_at[page] = now

    def discard(self, page: PageId) -> None:
        """A page that is here is referenced or pinned again, or gone."""
        before, after = self._previous[page], self._next[page]
        assert after != ABSENT
        self._next[before] = after
        self._previous[after] = before
        self._next[page] = ABSENT
        self._count -= 1

    def rename(self, page: PageId, new: PageId) -> None:
        """A page, here or not, has another id from now on, which is not here."""
        self._last_used_at[new] = self._last_used_at[page]
        if page not in self:
            return
        before, after = self._previous[page], self._next[page]
        self._next[before] = self._previous[after] = new
        self._previous[new], self._next[new] = before, after
        self._next[page] = ABSENT

    def extend(self, capacity_pages: int) -> None:
        """Have room for so many page ids in all. O(n)."""
        lanes = [
            (lane, partial, list(self._walk(lane, partial)))
            for lane in range(self._lanes)
            for partial in (True, False)
        ]
        self._last_used_at.extend([0.0] * (capacity_pages - self._capacity))
        self._capacity = capacity_pages
        self._clear(self._lanes)
        for lane, partial, pages in lanes:
            for page in pages:
                self._append(page, self._head(lane, partial))

    def note_use(self, page: PageId, now: float) -> None:
        """A page that is not here lost its last reference."""
        self._last_used_at[page] = now

    def last_used_at(self, page: PageId) -> float:
        """When a page that is or was here lost its last reference."""
        return self._last_used_at[page]

    def last_used_at_of(self, pages: range) -> "array[float]":
        """The same for pages that lie together."""
        return self._last_used_at[pages.start : pages.stop]

    def coldest(self, count: int, first: Sequence[tuple[int, int]] = ()) -> list[PageId]:
        """Up to `count` pages, next victim first. O(count).

        Args:
            first: Lanes and how many of their pages go before all others.
        """
        pages: list[PageId] = []
        for lane, most in first:
            walks = chain(self._walk(lane, True), self._walk(lane, False))
            pages += islice(walks, min(most, count - len(pages)))
        if not pages:
            return list(islice(self._all(), count))
        taken = set(pages)
        others = (page for page in self._all() if page not in taken)
        return pages + list(islice(others, count - len(pages)))

    def in_order(self) -> list[PageId]:
        """All pages, next victim first. O(n); for the operator and the audit."""
        return list(self._all())

    def arrange(self, lanes: int, lane_of: Callable[[PageId], int]) -> None:
        """Put every page into the lane it belongs to now. O(n); for changes of the lanes only."""
        kinds = [(partial, list(self._merged(partial))) for partial in (True, False)]
        self._clear(lanes)
        for partial, pages in kinds:
            for page in pages:
                self._append(page, self._head(lane_of(page), partial))

    def _clear(self, lanes: int) -> None:
        self._lanes = lanes
        self._next = array("i", [ABSENT]) * (self._capacity + 2 * lanes)
        self._previous = array("i", [ABSENT]) * (self._capacity + 2 * lanes)
        self._count = 0
        for head in range(self._capacity, self._capacity + 2 * lanes):
            self._next[head] = self._previous[head] = head

    def _head(self, lane: int, partial: bool) -> int:
        """Index of a list's head, beyond all pages."""
        return self._capacity + 2 * lane + partial

    def _append(self, page: PageId, head: int) -> None:
        last = self._previous[head]
        self._next[last] = self._previous[head] = page
        self._previous[page] = last
        self._next[page] = head
        self._count += 1

    def _walk(self, lane: int, partial: bool) -> Iterator[PageId]:
        head = self._head(lane, partial)
        page = self._next[head]
        while page != head:
            yield PageId(page)
            page = self._next[page]

    def _merged(self, partial: bool) -> Iterator[PageId]:
        if self._lanes == 1:
            return self._walk(0, partial)
        walks = [self._walk(lane, partial) for lane in range(self._lanes)]
        return merge(*walks, key=self._last_used_at.__getitem__)

    def _all(self) -> Iterator[PageId]:
        for partial in (True, False):
            yield from self._merged(partial)
