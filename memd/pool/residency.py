"""Where cached pages live: what leaves the device, how, and what comes back from the host.

Decides and books; the copies themselves are orders that the engine hands to a copier, which reports
each as finished. A page being copied out can still be read and held, but is not freed before its
copy has ended. A page being copied in belongs to its transfer alone until it has arrived.
"""

from collections.abc import Callable, Iterable, Sequence

from memd.errors import InvariantError
from memd.pool.blocks import Blocks
from memd.pool.counters import PoolCounters
from memd.pool.disk import DiskTier
from memd.pool.ghosts import Ghosts
from memd.pool.host_slots import HostSlots
from memd.pool.lru import LruEviction
from memd.pool.moves import Move, Orders, Transfer
from memd.pool.pages import Pages
from memd.pool.prefix_tree import Node, PrefixTree
from memd.pool.restored import Restored
from memd.pool.tenants import Tenants
from memd.types import EvictionReason, PageId, SlotId, TransferId


class Residency:
    """Evicts, writes back and restores cached pages.

    Args:
        pages, tree, lru, blocks, host: Of one pool.
        ghosts: Learns what is dropped.
        tenants: Say whose pages go first.
        counters, disk: Of the pool.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        pages: Pages,
        tree: PrefixTree,
        lru: LruEviction,
        blocks: Blocks,
        host: HostSlots,
        ghosts: Ghosts,
        tenants: Tenants,
        counters: PoolCounters,
        disk: DiskTier,
        clock: Callable[[], float],
    ) -> None:
        self._orders = Orders(clock)
        self.moves = self._orders.under_way
        self.moving_packed = self._orders.packed
        self.leaving: set[PageId] = set()  # being copied out
        self.arriving: dict[Node, TransferId] = {}  # being copied in
        self.restored = Restored(counters)
        self.unsaved: set[PageId] = set()  # a copy to the host has failed; it is not tried again
        self.host_only = 0  # nodes with a host copy and no page
        self.host = host
        self._pages = pages
        self._tree = tree
        self._lru = lru
        self._blocks = blocks
        self._ghosts = ghosts
        self._tenants = tenants
        self._counters = counters
        self._disk = disk
        self._clock = clock

    @property
    def clean_pages(self) -> int:
        """Device pages with a copy on the host."""
        moves = self.moves.values()
        coming = sum(1 for move in moves if move.transfer.path == "d2h" and move.node)
        return self.host.used - coming - self.host.doomed - self.host_only

    def count_packed(self, nodes: Sequence[Node]) -> int:
        """How many nodes have a packed page, or the host copy of one where they have no page."""
        if not self._blocks.packed_blocks and not self.host.packed:
            return 0
        return sum(
            node.host in self.host.packed
            if node.page is None
            else self._blocks.is_packed(node.page)
            for node in nodes
        )

    def victims(self, count: int) -> list[PageId]:
        """Up to `count` cached pages, next to go first: those of tenants above their quota."""
        return self._lru.coldest(count, self._tenants.excess())

    def take_orders(self) -> list[Transfer]:
        """Transfers to start now, in order."""
        return self._orders.take()

    def evict_now(self, count: int, reason: EvictionReason) -> int:
        """Free pages at once, coldest first: those with a host copy, then others, which are lost.

        Returns:
            How many pages became free; at least `count` if so many are cached and not leaving.
        """
        started_at = self._clock()
        candidates = self.victims(2 * count + len(self.leaving))
        freed: list[PageId] = []
        for clean in (True, False) if self.host.used or len(self._disk.index) else (False,):
            for page in candidates:
                if len(freed) >= count:
                    break
                node = self.victim(page)
                if node is None or (clean and node.host is None and not self._disk.holds(node.key)):
                    continue
                self._evict(page, node, reason, started_at, freed)
        self._freed(freed, started_at)
        return len(freed)

    def reclaim(self, count: int, reason: EvictionReason) -> int:
        """Make pages free, coldest first; those without a host copy are copied there before.

        Returns:
            Pages that are free now, and pages that will be when their copies have ended.
        """
        started_at = self._clock()
        freed: list[PageId] = []
        ordered = 0
        for page in self.victims(count + len(self.leaving)):
            if len(freed) + ordered >= count:
                break
            node = self.victim(page)
            if node is None:
                continue
            if node.host is None and self._worth_keeping(node) and self.write_back(node, reason):
                ordered += 1
            elif self.victim(page) is node:  # making room on the host may have taken it already
                self._evict(page, node, reason, started_at, freed)
        self._freed(freed, started_at)
        return len(freed) + ordered

    def make_room(self, num_pages: int, kept: list[PageId]) -> bool:
        """See to it that pages are free in the next steps, without loss where there is a host tier.

        Args:
            num_pages: Full pages about to be allocated.
            kept: Cached pages that must not go for them.

        Returns:
            Whether to allocate now: so many are free, or only eviction at once can free them.
        """
        missing = num_pages - self._blocks.free_full_pages
        if missing <= 0 or not self.host.room:
            return True
        going = sum(1 for move in self.moves.values() if move.then_evict is not None)
        self._pages.hold(kept)
        self.reclaim(missing - going, "ahead")
        self._blocks.put(self._pages.drop(kept[::-1], self._clock()))
        return num_pages <= self._blocks.free_full_pages

    def clean(self, count: int) -> None:
        """Copy the coldest dirty pages to the host, so that evicting them later costs nothing."""
        for page in self.victims(count if self.host.capacity else 0):
            node = self.victim(page)
            if node is None or node.host is not None or self._disk.holds(node.key):
                continue
            oldest = self.host.oldest() if self.host.used >= self.host.capacity else None
            if oldest is not None and oldest[1].page is not None:
                return  # it would only make another page dirty instead
            if self._worth_keeping(node) and not self.write_back(node, None):
                return

    def restore(self, nodes: Iterable[Node], pages: list[PageId]) -> None:
        """Order the copies of host pages into device pages.

        Args:
            nodes: With a host copy, no page, and not arriving.
            pages: One for each, opened for the transfer, of the format of its host copy.
        """
        for node, page in zip(nodes, pages, strict=True):
            assert node.host is not None
            self.host.pin(node.host)
            packed = node.host in self.host.packed
            self.arriving[node] = self._orders.add("h2d", page, node.host, node, packed)

    def finish(self, transfer_id: TransferId, succeeded: bool) -> None:
        """A copy has ended. One that nobody knows, or that was reported before, is only counted."""
        move = self._orders.end(transfer_id)
        if move is None:
            self._counters.late_transfers += 1
            return
        seconds = self._clock() - move.ordered_at
        transfer = move.transfer
        self._counters.count_transfer(transfer.path, succeeded, seconds, transfer.packed)
        if transfer.path == "d2h":
            self._left(move, succeeded)
        else:
            self._arrived(move, succeeded)

    def shrink_host(self) -> None:
        """Evict host copies until the capacity is kept, as far as they are not pinned."""
        while self.host.used > self.host.capacity and self.evict_host_copy():
            pass

    def adopt(self, node: Node, page: PageId) -> None:
        """A node whose content was on the host only has a page again."""
        node.page = page
        self.host_only -= 1

    def let_pass(self, node: Node) -> None:
        """The host copy of a page that has passed through goes, if the host tier has no room."""
        over = self.host.used - self.host.doomed > self.host.capacity
        if over and node.host is not None and node not in self.arriving:
            self.give_up(node)

    def give_up(self, node: Node) -> None:
        """Forget a host copy, and the node and what follows it unless its page is there."""
        assert node.host is not None
        self.drop_host_copy(node, node.host)
        if node.page is None:
            self._lose(node)

    def renamed(self, page: PageId, target: PageId) -> None:
        """The content of a page has moved to another."""
        self.restored.renamed(page, target)
        if page in self.unsaved:
            self.unsaved.remove(page)
            self.unsaved.add(target)

    def victim(self, page: PageId) -> Node | None:
        """The node of a page that can be evicted now."""
        if page in self.leaving or page not in self._lru:
            return None
        return self._pages.node[page]

    def _worth_keeping(self, node: Node) -> bool:
        wanted = self.host.capacity > 0 or node in self._disk.wanted
        return wanted and node.end == self._tree.page_tokens and node.page not in self.unsaved

    def _evict(
        self, page: PageId, node: Node, reason: EvictionReason, now: float, freed: list[PageId]
    ) -> None:
        self.restored.evicted(page)
        self._pages.evict(page)
        self.unsaved.discard(page)
        self._counters.evicted[reason] += 1
        node.page = None
        freed.append(page)
        if node.host is not None or self._disk.holds(node.key):
            self._counters.offloaded[reason] += 1
        else:
            self._ghosts.add(node.key, now)
        if node.host is not None:
            self.host_only += 1
            return
        self.drop_below(node, reason, freed)
        self._tree.remove(node)

    def drop_below(self, node: Node, reason: EvictionReason, freed: list[PageId]) -> None:
        """Forget what follows a node that is about to go: nothing can reach it any more."""
        for below in self._tree.cut_below(node):
            if below.page is not None:
                self.drop_page(below, below.page, reason, freed)
            elif below.host is not None:
                self.host_only -= 1
            if below.host is not None:
                self.drop_host_copy(below, below.host)

    def drop_page(
        self, node: Node, page: PageId, reason: EvictionReason, freed: list[PageId]
    ) -> None:
        """Forget a page of a node, now or, if it is being copied out, when that has ended."""
        self.restored.forgotten(page)
        if page in self.leaving:  # freed when its copy has ended
            move = next(move for move in self.moves.values() if move.transfer.page == page)
            move.node = None
            self.host.release(move.transfer.slot)
            self._pages.hold([page])
            self._pages.detach(page)
        else:
            if self._pages.refs[page]:
                raise InvariantError(f"page {page} is held and a page before it is not")
            self.unsaved.discard(page)
            self._pages.evict(page)
            self._counters.evicted[reason] += 1
            freed.append(page)
        node.page = None

    def drop_host_copy(self, node: Node, slot: SlotId) -> None:
        """Forget the host copy of a node; one that is being brought up arrives for nobody."""
        node.host = None
        self.host.release(slot)
        self._disk.host_copy_gone(node)
        transfer_id = self.arriving.pop(node, None)
        if transfer_id is not None:
            self.moves[transfer_id].node = None
            self._counters.prefetched["cancelled"] += 1

    def write_back(self, node: Node, then_evict: EvictionReason | None) -> bool:
        """Order a copy to the host; False when there is no slot for it."""
        beyond = self._disk.passing_slots if node in self._disk.wanted else 0
        slot = self.host.take(node, beyond)
        if slot is None and self.evict_host_copy() and node.page is not None:
            slot = self.host.take(node, beyond)  # unless the node went with that copy
        if slot is None:
            return False
        assert node.page is not None
        packed = self._blocks.is_packed(node.page)
        if packed:
            self.host.packed.add(slot)
        self.leaving.add(node.page)
        self._orders.add("d2h", node.page, slot, node, packed, then_evict)
        return True

    def evict_host_copy(self) -> bool:
        """Forget the oldest host copy; with it goes what only it made reachable."""
        found = self.host.oldest()
        if found is None:
            return False
        slot, node = found
        node.host = None
        self.host.release(slot)
        self._counters.host_evicted += 1
        if node.page is None:
            if not self._disk.holds(node.key):
                self._ghosts.add(node.key, self._clock())
            self._lose(node)
        return True

    def _left(self, move: Move, succeeded: bool) -> None:
        page, slot, node = move.transfer.page, move.transfer.slot, move.node
        self.leaving.discard(page)
        self.host.unpin(slot)
        if node is None:
            self._blocks.put(self._pages.drop([page], self._clock()))
            return
        if succeeded:
            node.host = slot
        else:
            self.host.release(slot)
            self.unsaved.add(page)
        if move.then_evict is not None and page in self._lru:
            now = self._clock()
            freed: list[PageId] = []
            self._evict(page, node, move.then_evict, now, freed)
            self._freed(freed, now)

    def _arrived(self, move: Move, succeeded: bool) -> None:
        page, slot, node = move.transfer.page, move.transfer.slot, move.node
        self.host.unpin(slot)
        if node is not None:
            del self.arriving[node]
            if succeeded and node.page is None:
                self.adopt(node, page)
                self._pages.seal(page, node)
                self.restored.arrived(page, "disk" if slot in self.host.from_disk else "host")
                self.host.from_disk.discard(slot)
            elif succeeded:  # computed again meanwhile
                self._counters.prefetched["late"] += 1
            if succeeded:
                self.let_pass(node)
            else:
                self.give_up(node)
        self._blocks.put(self._pages.drop([page], self._clock()))

    def _lose(self, node: Node) -> None:
        """The last copy of a node's content, on the host, is gone."""
        self.host_only -= 1
        freed: list[PageId] = []
        self.drop_below(node, "admin", freed)
        self._tree.remove(node)
        self._blocks.put(freed)

    def _freed(self, pages: list[PageId], started_at: float) -> None:
        if pages:
            self._blocks.put(pages)
            ages = [started_at - self._pages.opened_at[page] for page in pages]
            idle = [started_at - self._lru.last_used_at(page) for page in pages]
            self._counters.count_evictions(ages, idle, self._clock() - started_at)
