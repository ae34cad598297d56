"""The state of every page, and the only place where it changes."""

from collections.abc import Sequence
from enum import IntEnum

from memd.errors import InvariantError
from memd.pool.lru import LruEviction
from memd.pool.prefix_tree import Node
from memd.types import PageId


class PageState(IntEnum):
    """Life of a page on the device. A sealed page without references is *cached*."""

    FREE = 0
    WRITING = 1
    SEALED = 2
    QUARANTINED = 3


class Pages:
    """State, references and tree node of each page, with running totals.

    Args:
        count: Pages in the pool.
        page_tokens: Tokens in a full page.
        lru: Holds the cached pages.
    """

    def __init__(self, count: int, page_tokens: int, lru: LruEviction) -> None:
        self.page_tokens = page_tokens
        self.state = bytearray(count)
        self.refs = [0] * count
        self.node: list[Node | None] = [None] * count
        self.tokens = [0] * count  # stored in a sealed page; a node's end can move to another page
        self.opened_at = [0.0] * count
        self.active = 0  # pages with references
        self.quarantined = 0
        self.shared = 0  # pages with two references or more
        self.sealed = 0  # pages in the tree
        self.references = 0  # of all pages together
        self.sealed_active_tokens = 0
        self.cached_tokens = 0
        self._lru = lru

    @property
    def cached(self) -> int:
        """Sealed pages without references; all of them can be evicted."""
        return len(self._lru)

    def open(self, pages: Sequence[PageId], now: float) -> None:
        """FREE → WRITING, held once by the sequence that will write them."""
        for page in pages:
            if self.state[page] != PageState.FREE:
                raise InvariantError(f"page {page} handed out while {self._name(page)}")
            self.state[page] = PageState.WRITING
            self.refs[page] = 1
            self.opened_at[page] = now
        self.active += len(pages)
        self.references += len(pages)

    def seal(self, page: PageId, node: Node) -> None:
        """WRITING → SEALED: the page is in the tree at `node` and is never written again."""
        if self.state[page] != PageState.WRITING:
            raise InvariantError(f"page {page} sealed while {self._name(page)}")
        self.state[page] = PageState.SEALED
        self.sealed += 1
        self.node[page] = node
        self.tokens[page] = node.end
        self.sealed_active_tokens += node.end

    def hold(self, pages: Sequence[PageId]) -> None:
        """Add a reference to sealed pages; cached ones become active."""
        refs = self.refs
        for page in pages:
            count = refs[page]
            refs[page] = count + 1
            if count == 0:
                self._lru.discard(page)
                self.cached_tokens -= self.tokens[page]
                self.sealed_active_tokens += self.tokens[page]
                self.active += 1
            elif count == 1:
                self.shared += 1
        self.references += len(pages)

    def drop(self, pages: Sequence[PageId], now: float) -> list[PageId]:
        """Take a reference from each page, in the order given (a sequence's deepest page first).

        Returns:
            The pages that became FREE: those that are in no tree node. The others are now cached or
            still held.
        """
        freed: list[PageId] = []
        refs = self.refs
        for page in pages:
            count = refs[page] - 1
            refs[page] = count
            if count == 1:
                self.shared -= 1
            elif count == 0:
                self.active -= 1
                if self.node[page] is None:
                    self.state[page] = PageState.FREE
                    freed.append(page)
                else:
                    tokens = self.tokens[page]
                    self._lru.add(page, tokens < self.page_tokens, now)
                    self.sealed_active_tokens -= tokens
                    self.cached_tokens += tokens
            elif count < 0:
                raise InvariantError(f"page {page} released more often than held")
        self.references -= len(pages)
        return freed

    def detach(self, page: PageId) -> bool:
        """SEALED → out of the tree: its node went to another page. Returns whether it is FREE now.

        A page still held (the source of a copy) is freed when its last reference goes.
        """
        self.sealed -= 1
        self.node[page] = None
        if self.refs[page]:
            self.state[page] = PageState.WRITING
            self.sealed_active_tokens -= self.tokens[page]
            return False
        self._lru.discard(page)
        self.cached_tokens -= self.tokens[page]
        self.state[page] = PageState.FREE
        return True

    def evict(self, page: PageId) -> None:
        """SEALED → FREE for a cached page."""
        if self.node[page] is None or self.refs[page]:
            raise InvariantError(f"page {page} evicted while {self._name(page)}")
        self._lru.discard(page)
        self.state[page] = PageState.FREE
        self.sealed -= 1
        self.node[page] = None
        self.cached_tokens -= self.tokens[page]

    def quarantine(self, page: PageId) -> None:
        """WRITING → QUARANTINED: suspect bytes; nobody gets it until an audit lets it go."""
        if self.state[page] != PageState.WRITING or self.refs[page] != 1:
            raise InvariantError(f"page {page} quarantined while {self._name(page)}")
        self.state[page] = PageState.QUARANTINED
        self.refs[page] = 0
        self.active -= 1
        self.references -= 1
        self.quarantined += 1

    def pardon(self, page: PageId) -> None:
        """QUARANTINED → FREE."""
        if self.state[page] != PageState.QUARANTINED:
            raise InvariantError(f"page {page} pardoned while {self._name(page)}")
        self.state[page] = PageState.FREE
        self.quarantined -= 1

    def _name(self, page: PageId) -> str:
        return PageState(self.state[page]).name
