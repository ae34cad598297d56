"""Prefixes that eviction does not take: for a time or until told otherwise, within a budget."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from memd.errors import MemdError
from memd.pool.counters import PoolCounters
from memd.pool.pages import Pages
from memd.pool.prefix_tree import Node, PrefixTree
from memd.pool.tenants import Tenants
from memd.types import PageId


class PinRefused(MemdError):
    """A pin would exceed the budget, or there is nothing to pin; the message has the numbers."""


@dataclass(slots=True, eq=False)
class Pin:
    """Protection of the pages from a root to `nodes[-1]`.

    The first `covered` pages are protected; the others are on the host and are taken in as they
    arrive. `expires_at` is monotonic; None: never. `label`: what the maker calls it.
    """

    nodes: list[Node]
    expires_at: float | None
    label: str
    covered: int = 0
    ended: bool = False


class Pins:
    """The pins of a pool. Each covers a prefix from its root on, so what is pinned is closed
    upwards, as what is held is: a cached page never has a pinned one below it.

    Args:
        pages, tree, tenants, counters: Of the pool.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        pages: Pages,
        tree: PrefixTree,
        tenants: Tenants,
        counters: PoolCounters,
        clock: Callable[[], float],
    ) -> None:
        self.limit_ratio = 0.0  # of the pool's pages, and of a tenant's quota; live
        self.by_node: dict[Node, Pin] = {}  # by the last node covered
        self.capacity_pages = 0  # of the pool; set by it
        self._expiries: list[tuple[float, int, Pin]] = []  # a heap; a pin may last longer
        self._incomplete: list[Pin] = []
        self._serial = count()
        self._pages = pages
        self._tree = tree
        self._tenants = tenants
        self._counters = counters
        self._clock = clock

    @property
    def limit_pages(self) -> int:
        """Most pages that pins may protect."""
        return int(self.limit_ratio * self.capacity_pages)

    @property
    def promised_pages(self) -> int:
        """Pages that pins protect, held or not, and pages still to arrive for them."""
        coming = sum(len(pin.nodes) - pin.covered for pin in self._incomplete)
        return sum(self._tenants.pinned_pages) + coming

    def pin(
        self, node: Node, ttl_seconds: float | None, label: str, tenant: int | None = None
    ) -> Pin:
        """Protect the prefix that ends at a full page's node, or protect it for longer.

        Args:
            node: In the tree, with a page on the device or a copy on the host.
            ttl_seconds: From now; None: until released. A pin that lasts longer keeps its time.
            label: What the maker calls it.
            tenant: Whose wish it is, and whose quota bounds it; None: an operator's.

        Raises:
            PinRefused: over the budget, or not a full page. Nothing has changed.
        """
        now = self._clock()
        expires_at = None if ttl_seconds is None else now + ttl_seconds
        pin = self.by_node.get(node)
        if pin is not None:
            if expires_at is None or pin.expires_at is None:
                pin.expires_at = None
            else:
                pin.expires_at = max(expires_at, pin.expires_at)
            pin.label = label or pin.label
            self._counters.pins["renewed"] += 1
            return pin
        nodes = self._path(node)
        try:
            self._check(nodes, tenant)
        except PinRefused:
            self._counters.pins["refused"] += 1
            raise
        pin = self.by_node[node] = Pin(nodes, expires_at, label)
        self._remember(pin)
        self._incomplete.append(pin)
        self._extend()
        self._counters.pins["pinned"] += 1
        return pin

    def release(self, pin: Pin) -> None:
        """End a pin."""
        self._end(pin)
        self._counters.pins["released"] += 1

    def advance(self) -> None:
        """Let expired pins go, and take in pages that have arrived. O(1) when there are none."""
        now = self._clock()
        while self._expiries and self._expiries[0][0] <= now:
            pin = heapq.heappop(self._expiries)[2]
            if pin.ended or pin.expires_at is None:
                continue
            if pin.expires_at > now:  # renewed
                self._remember(pin)
            else:
                self._end(pin)
                self._counters.pins["expired"] += 1
        if self._incomplete:
            self._extend()

    def incomplete(self) -> list[Pin]:
        """Pins with pages that have not arrived yet."""
        return list(self._incomplete)

    def covering(self) -> dict[Node, Pin]:
        """The pin that lasts longest of those that cover each node. O(pages pinned)."""
        found: dict[Node, Pin] = {}
        for pin in self.by_node.values():
            for node in pin.nodes:
                other = found.get(node)
                if other is None or _lasts_longer(pin, other):
                    found[node] = pin
        return found

    def protected(self) -> list[PageId]:
        """Each page that pins protect, once for each pin. O(pages pinned); for the audit."""
        return [
            node.page
            for pin in self.by_node.values()
            for node in pin.nodes[: pin.covered]
            if node.page is not None
        ]

    def _path(self, node: Node) -> list[Node]:
        nodes = [node]
        if node.end < self._tree.page_tokens:
            raise PinRefused("a page that is not full cannot be pinned")
        while not (node := self._tree.page_parent(node)).is_root:
            nodes.append(node)
        nodes.reverse()
        return nodes

    def _check(self, nodes: list[Node], tenant: int | None) -> None:
        pins = self._pages.pins
        new = sum(1 for node in nodes if node.page is None or not pins[node.page])
        if self.promised_pages + new > self.limit_pages:
            raise PinRefused(
                f"the pin needs {new} pages more, {self.promised_pages} are pinned and the limit "
                f"is {self.limit_pages} (memory.pin_limit)"
            )
        quota = None if tenant is None else self._tenants.quota(tenant)
        if tenant is None or quota is None:
            return
        pinned, limit = self._tenants.pinned_pages[tenant], int(self.limit_ratio * quota)
        if pinned + new > limit:
            raise PinRefused(
                f"the pin needs {new} pages more, the tenant has {pinned} pinned and its limit is "
                f"{limit} (memory.pin_limit of its quota)"
            )

    def _extend(self) -> None:
        """Protect what is on the device now of pins that miss pages, up to the first missing."""
        waiting: list[Pin] = []
        for pin in self._incomplete:
            while pin.covered < len(pin.nodes):
                node = pin.nodes[pin.covered]
                if node.page is None:
                    break
                self._pages.pin(node.page)
                pin.covered += 1
            if pin.covered == len(pin.nodes):
                continue
            if pin.nodes[pin.covered].host is not None:
                waiting.append(pin)
            else:
                self._truncate(pin)
        self._incomplete = waiting

    def _truncate(self, pin: Pin) -> None:
        """What a pin waits for will not come: its host copy is gone."""
        del self.by_node[pin.nodes[-1]]
        del pin.nodes[pin.covered :]
        if pin.nodes and pin.nodes[-1] not in self.by_node:
            self.by_node[pin.nodes[-1]] = pin
        else:
            self._unprotect(pin)
            self._counters.pins["lost"] += 1

    def _end(self, pin: Pin) -> None:
        del self.by_node[pin.nodes[-1]]
        if pin in self._incomplete:
            self._incomplete.remove(pin)
        self._unprotect(pin)

    def _unprotect(self, pin: Pin) -> None:
        pin.ended = True
        now = self._clock()
        for node in reversed(pin.nodes[: pin.covered]):
            assert node.page is not None
            self._pages.unpin(node.page, now)

    def _remember(self, pin: Pin) -> None:
        if pin.expires_at is not None:
            heapq.heappush(self._expiries, (pin.expires_at, next(self._serial), pin))


def _lasts_longer(pin: Pin, other: Pin) -> bool:
    if other.expires_at is None:
        return False
    return pin.expires_at is None or pin.expires_at > other.expires_at
