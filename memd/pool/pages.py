"""The state of every page, and the only place where it changes."""

from array import array
from collections.abc import Sequence
from enum import IntEnum

from memd.errors import InvariantError
from memd.pool.blocks import Blocks
from memd.pool.lru import LruEviction
from memd.pool.prefix_tree import Node
from memd.pool.tenants import Tenants
from memd.types import PageId


class PageState(IntEnum):
    """Life of a page on the device.

    A sealed page without references is *pinned* if a pin protects it, else *cached*.
    """

    FREE = 0
    WRITING = 1
    SEALED = 2
    QUARANTINED = 3


class Pages:
    """State, references, pins and tree node of each page, with running totals.

    Args:
        blocks: Know the format of each page.
        page_tokens: Tokens in a full page.
        lru: Holds the cached pages.
        tenants: Are charged for the others.
    """

    def __init__(
        self, blocks: Blocks, page_tokens: int, lru: LruEviction, tenants: Tenants
    ) -> None:
        count = blocks.room_pages
        self.page_tokens = page_tokens
        self.state = bytearray(count)
        self.refs = [0] * count
        self.pins = [0] * count
        self.owner = array("i", [0]) * count  # number of the tenant charged
        self.node: list[Node | None] = [None] * count
        self.tokens = [0] * count  # stored in a sealed page; a node's end can move to another page
        self.opened_at = [0.0] * count
        self.active = 0  # pages with references
        self.pinned = 0  # pages without, that pins protect
        self.cached_packed = 0  # of the cached pages
        self.quarantined = 0
        self.shared = 0  # pages with two references or more
        self.sealed = 0  # pages in the tree
        self.references = 0  # of all pages together
        self.sealed_active_tokens = 0
        self.cached_tokens = 0
        self.pinned_tokens = 0
        self._blocks = blocks
        self._lru = lru
        self._tenants = tenants

    @property
    def cached(self) -> int:
        """Sealed pages without references or pins; all of them can be evicted."""
        return len(self._lru)

    def is_cached(self, page: PageId) -> bool:
        """Whether a page has neither references nor pins, and is in the tree."""
        return page in self._lru

    def extend(self, count: int) -> None:
        """Have room for `count` page ids in all; those that are new are FREE."""
        more = count - len(self.state)
        self.state += bytes(more)
        self.owner.extend([0] * more)
        for column in (self.refs, self.pins, self.tokens):
            column.extend([0] * more)
        self.opened_at += [0.0] * more
        self.node += [None] * more
        self._lru.extend(count)

    def move(self, source: PageId, target: PageId) -> None:
        """What a WRITING or SEALED page is, a FREE one is from now on, which takes its place."""
        if self.state[target] != PageState.FREE:
            raise InvariantError(f"page {source} moved to {target} while {self._name(target)}")
        if self.state[source] not in (PageState.WRITING, PageState.SEALED):
            raise InvariantError(f"page {source} moved while {self._name(source)}")
        self.state[target], self.state[source] = self.state[source], PageState.FREE
        self.refs[target], self.refs[source] = self.refs[source], 0
        self.pins[target], self.pins[source] = self.pins[source], 0
        self.owner[target] = self.owner[source]
        self.tokens[target] = self.tokens[source]
        self.opened_at[target] = self.opened_at[source]
        node = self.node[source]
        self.node[target], self.node[source] = node, None
        if node is not None:
            node.page = target
        if source in self._lru:
            self.cached_packed += self._blocks.is_packed(target) - self._blocks.is_packed(source)
        self._lru.rename(source, target)

    def open(self, pages: Sequence[PageId], now: float, tenant: int = 0) -> None:
        """FREE → WRITING, held once by the sequence that will write them, charged to its tenant."""
        for page in pages:
            if self.state[page] != PageState.FREE:
                raise InvariantError(f"page {page} handed out while {self._name(page)}")
            self.state[page] = PageState.WRITING
            self.refs[page] = 1
            self.opened_at[page] = now
            self.owner[page] = tenant
        self._tenants.used_pages[tenant] += len(pages)
        self.active += len(pages)
        self.references += len(pages)

    def seal(self, page: PageId, node: Node) -> None:
        """WRITING → SEALED: the page is in the tree at `node` and is never written again."""
        if self.state[page] != PageState.WRITING:
            raise InvariantError(f"page {page} sealed while {self._name(page)}")
        self.state[page] = PageState.SEALED
        self.sealed += 1
        self.node[page] = node
        node.owner = self.owner[page]
        self.tokens[page] = node.end
        self.sealed_active_tokens += node.end

    def hold(self, pages: Sequence[PageId]) -> None:
        """Add a reference to sealed pages; cached and pinned ones become active."""
        refs = self.refs
        for page in pages:
            count = refs[page]
            refs[page] = count + 1
            if count == 0:
                self._disturb(page)
                self.sealed_active_tokens += self.tokens[page]
                self.active += 1
            elif count == 1:
                self.shared += 1
        self.references += len(pages)

    def drop(self, pages: Sequence[PageId], now: float) -> list[PageId]:
        """Take a reference from each page, in the order given (a sequence's deepest page first).

        Returns:
            The pages that became FREE: those that are in no tree node. The others are now cached,
            pinned or still held.
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
                    self._free(page)
                    freed.append(page)
                else:
                    self.sealed_active_tokens -= self.tokens[page]
                    self._rest(page, now)
            elif count < 0:
                raise InvariantError(f"page {page} released more often than held")
        self.references -= len(pages)
        return freed

    def pin(self, page: PageId) -> None:
        """Protect a sealed page from eviction; a cached one becomes pinned."""
        if self.state[page] != PageState.SEALED:
            raise InvariantError(f"page {page} pinned while {self._name(page)}")
        if not self.pins[page]:
            if not self.refs[page]:
                self._disturb(page)
                self.pinned += 1
                self.pinned_tokens += self.tokens[page]
            self._tenants.pinned_pages[self.owner[page]] += 1
        self.pins[page] += 1

    def unpin(self, page: PageId, now: float) -> None:
        """Take a pin from a page; without another pin or a reference it becomes cached."""
        if not self.pins[page]:
            raise InvariantError(f"page {page} unpinned more often than pinned")
        self.pins[page] -= 1
        if not self.pins[page]:
            self._tenants.pinned_pages[self.owner[page]] -= 1
            if not self.refs[page]:
                self.pinned -= 1
                self.pinned_tokens -= self.tokens[page]
                self._rest(page, now)

    def detach(self, page: PageId) -> bool:
        """SEALED → out of the tree: its node went to another page. Returns whether it is FREE now.

        A page still held (the source of a copy) is freed when its last reference goes.
        """
        if self.pins[page]:
            raise InvariantError(f"page {page} detached while pinned")
        self.sealed -= 1
        self.node[page] = None
        if self.refs[page]:
            self.state[page] = PageState.WRITING
            self.sealed_active_tokens -= self.tokens[page]
            return False
        self._disturb(page)
        self._free(page)
        return True

    def evict(self, page: PageId) -> None:
        """SEALED → FREE for a cached page."""
        if self.node[page] is None or self.refs[page] or self.pins[page]:
            raise InvariantError(f"page {page} evicted while {self._name(page)}")
        self._disturb(page)
        self._free(page)
        self.sealed -= 1
        self.node[page] = None

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
        self._free(page)
        self.quarantined -= 1

    def _free(self, page: PageId) -> None:
        self.state[page] = PageState.FREE
        self._tenants.used_pages[self.owner[page]] -= 1

    def _rest(self, page: PageId, now: float) -> None:
        """A sealed page lost its last reference or its last pin, and has none of the other."""
        tokens = self.tokens[page]
        if self.pins[page]:
            self.pinned += 1
            self.pinned_tokens += tokens
            self._lru.note_use(page, now)
        else:
            lane = self._tenants.lane(self.owner[page])
            self._lru.add(page, tokens < self.page_tokens, now, lane)
            self.cached_tokens += tokens
            if self._blocks.packed_blocks:
                self.cached_packed += self._blocks.is_packed(page)

    def _disturb(self, page: PageId) -> None:
        """A cached or pinned page is neither any more."""
        if self.pins[page]:
            self.pinned -= 1
            self.pinned_tokens -= self.tokens[page]
        else:
            self._lru.discard(page)
            self.cached_tokens -= self.tokens[page]
            if self._blocks.packed_blocks:
                self.cached_packed -= self._blocks.is_packed(page)

    def _name(self, page: PageId) -> str:
        return PageState(self.state[page]).name
