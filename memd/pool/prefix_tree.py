"""Radix tree of pages keyed by their tokens: finds, to the token, what is already computed.

Pure data structure: it knows tokens and page ids, not states or references. Tokens are compared on
every match; no digest is trusted. Costs depend on the tokens walked, never on the
tree's size.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from memd.pool.keys import page_key, root_key
from memd.types import PageId, SlotId

MAX_NODES_TRIED = 64  # these two bound the search for a page to copy a part from
MAX_CHILDREN_TRIED = 8
HEAT_HALF_LIFE_SECONDS = 3600.0
TOKEN_BYTES = 4  # labels hold tokens as native int32, so that comparing them is one memcmp


class Node:
    """A stretch of tokens within one page.

    A node that ends a page's tokens has the page, or a copy of it on the host, or both. Its
    ancestors up to the previous page's node are forks, where pages with a common beginning part;
    forks have neither, and at least two children.
    """

    __slots__ = (
        "_below",
        "end",
        "heat",
        "hit_at",
        "hits",
        "host",
        "key",
        "label",
        "owner",
        "page",
        "parent",
    )

    def __init__(
        self, parent: "Node | None", label: bytes, page: PageId | None, end: int, key: bytes
    ) -> None:
        self.parent = parent
        self.label = label  # tokens from the parent's end to this node's end
        self.page = page
        self.host: SlotId | None = None
        self.end = end  # tokens of the page up to here; page_tokens for a full page and for a root
        self.key = key  # names the content from the root to here (memd.pool.keys); empty for a fork
        self.hits = 0  # requests that found this page when they started
        self.hit_at = 0.0  # the last of them, monotonic seconds
        self.owner = 0  # number of the tenant whose sequence computed it
        self.heat = 0.0  # hits, each counting half after HEAT_HALF_LIFE_SECONDS
        # Most nodes have one child; a dict by first token for each would cost more than the rest.
        self._below: Node | dict[bytes, Node] | None = None

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_fork(self) -> bool:
        """Parts pages with a common beginning; stands for no page of its own."""
        return self.page is None and self.host is None and self.parent is not None

    @property
    def is_leaf(self) -> bool:
        return self._below is None

    def each_child(self) -> Iterable["Node"]:
        """All children, in no particular order."""
        below = self._below
        if below is None:
            return ()
        return below.values() if isinstance(below, dict) else (below,)

    @property
    def children(self) -> list["Node"]:
        """All children, in no particular order."""
        return list(self.each_child())

    def some_children(self, limit: int) -> list["Node"]:
        """Up to `limit` children. O(limit)."""
        return list(islice(self.each_child(), limit))

    def child(self, first_token: bytes) -> "Node | None":
        """The child whose label begins with a token, if any."""
        below = self._below
        if below is None:
            return None
        if isinstance(below, dict):
            return below.get(first_token)
        return below if below.label[:TOKEN_BYTES] == first_token else None

    def hit(self, now: float) -> None:
        """A request found this node's page."""
        self.heat = self.heat_at(now) + 1
        self.hits += 1
        self.hit_at = now

    def heat_at(self, now: float) -> float:
        """What is left of the heat by now."""
        return self.heat and self.heat * 0.5 ** ((now - self.hit_at) / HEAT_HALF_LIFE_SECONDS)

    def put(self, child: "Node") -> None:
        """Add a child, or put it in the place of the one that begins with the same token."""
        below = self._below
        first_token = child.label[:TOKEN_BYTES]
        if isinstance(below, dict):
            below[first_token] = child
        elif below is None or below.label[:TOKEN_BYTES] == first_token:
            self._below = child
        else:
            self._below = {below.label[:TOKEN_BYTES]: below, first_token: child}

    def clear(self) -> None:
        """Remove all children."""
        self._below = None

    def take(self, child: "Node") -> None:
        """Remove a child."""
        below = self._below
        if isinstance(below, dict):
            del below[child.label[:TOKEN_BYTES]]
            if len(below) == 1:
                (self._below,) = below.values()
        else:
            assert below is child
            self._below = None


@dataclass(slots=True)
class TreeMatch:
    """What a lookup found: whole pages from the root on, then part of one more page.

    Nodes may have their page on the host only; the tail is on the device.
    """

    nodes: list[Node]
    tail: PageId | None  # a page whose first `tail_tokens` tokens continue the match
    tail_tokens: int


def _common_bytes(a: bytes, b: bytes) -> int:
    """Length of the common beginning in bytes, whole tokens."""
    limit = min(len(a), len(b))
    for start in range(0, limit, TOKEN_BYTES):
        if a[start : start + TOKEN_BYTES] != b[start : start + TOKEN_BYTES]:
            return start
    return limit - limit % TOKEN_BYTES


class PrefixTree:
    """Pages by namespace and tokens.

    Args:
        page_tokens: Tokens in a full page.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.page_bytes = page_tokens * TOKEN_BYTES
        self.num_nodes = 0
        self._roots: dict[str, Node] = {}

    def root(self, namespace: str) -> Node:
        """The root of a namespace; a new one belongs to the tree from its first insertion on."""
        root = self._roots.get(namespace)
        if root is None:
            root = Node(None, namespace.encode(), None, self.page_tokens, root_key(namespace))
        return root

    def namespaces(self) -> list[str]:
        """Every namespace that holds a page."""
        return list(self._roots)

    def match(
        self, namespace: str, data: bytes, no_source: Callable[[PageId], bool] | None = None
    ) -> TreeMatch:
        """The longest run of tokens from the start of `data` that pages of the namespace hold.

        Changes nothing.

        Args:
            no_source: Pages that a part cannot be copied from; None: there are none.
        """
        nodes: list[Node] = []
        node = self._roots.get(namespace)
        start = 0  # of the present page in data
        full = self.page_bytes
        while node is not None:
            child = node.child(data[start : start + TOKEN_BYTES])
            if child is None:
                break
            end = start + full
            if child.label == data[start:end] and child.end == self.page_tokens:
                nodes.append(child)
                node = child
                start = end
                continue
            found, position = self._descend(child, data, start)
            if found.is_fork or found.end < self.page_tokens or position < end:
                page, end = self._tail(found, position - start, no_source)
                return TreeMatch(nodes, page, end // TOKEN_BYTES)
            nodes.append(found)
            node = found
            start = end
        return TreeMatch(nodes, None, 0)

    def insert(
        self, parent: Node, data: bytes, page: PageId | None
    ) -> tuple[Node | None, PageId | None]:
        """Offer a page whose tokens are `data` (all of them), following `parent`.

        Args:
            parent: Root (from `root`, however old) or node of a full page.
            data: 1 to page_tokens tokens.
            page: The page that holds their KV; None: it is being read into a host slot.

        Returns:
            Where its tokens are now: the page's own node, the node of an equal page that was there
            before, or None when another page already begins with the same tokens (only for a
            part-filled page). And the part-filled page that the new one replaces, if any; it is no
            longer in the tree.
        """
        if parent.is_root:
            parent = self._roots.setdefault(parent.label.decode(), parent)
        key = page_key(parent.key, data)
        node = parent
        position = 0
        while True:
            if position == len(data):
                return None, None  # ends on a fork: others begin with these tokens
            child = node.child(data[position : position + TOKEN_BYTES])
            if child is None:
                return self._attach(node, data[position:], page, key, data), None
            common = _common_bytes(child.label, data[position:])
            if common < len(child.label):
                if position + common == len(data):
                    return None, None
                fork = self._split(child, common)
                return self._attach(fork, data[position + common :], page, key, data), None
            position += common
            if child.is_fork:
                node = child
            elif position == len(data):
                return child, None
            else:
                superseded = child.page
                child.label += data[position:]  # its first token stays, so its place does too
                child.page, child.end, child.key = page, len(data) // TOKEN_BYTES, key
                return child, superseded

    def remove(self, node: Node) -> None:
        """Take a childless page's node out, and its namespace's root with the last one."""
        parent = node.parent
        assert node.is_leaf
        assert parent is not None
        parent.take(node)
        self.num_nodes -= 1
        if parent.is_root and parent.is_leaf:
            self._roots.pop(parent.label.decode(), None)
        elif parent.is_fork and len(parent.children) == 1:
            self._merge(parent, parent.children[0])

    def cut_below(self, node: Node) -> list[Node]:
        """Take everything after a node out; returns it, parents first."""
        found = node.children
        for each in found:  # grows while it is walked
            found += each.children
        node.clear()
        self.num_nodes -= len(found)
        return found

    def walk(self, namespace: str) -> Iterator[Node]:
        """Every node below a root, parents first."""
        root = self._roots.get(namespace)
        stack = root.children if root else []
        while stack:
            node = stack.pop()
            yield node
            stack += node.children

    def page_label(self, node: Node) -> bytes:
        """All tokens of a node's page, from the page's beginning."""
        parts = [node.label]
        above = node.parent
        while above is not None and above.is_fork:
            parts.append(above.label)
            above = above.parent
        return b"".join(reversed(parts))

    def page_parent(self, node: Node) -> Node:
        """The root, or the node of the page before a node's page."""
        above = node.parent
        while above is not None and above.is_fork:
            above = above.parent
        assert above is not None
        return above

    def page_children(self, node: Node) -> list[Node]:
        """The nodes of the pages that follow a root's or a full page's node."""
        return list(self.each_page_child(node))

    def each_page_child(self, node: Node) -> Iterator[Node]:
        """The same one by one: below a root there may be very many."""
        stack = [node]
        while stack:
            for below in stack.pop().each_child():
                if below.is_fork:
                    stack.append(below)
                else:
                    yield below

    def _descend(self, child: Node, data: bytes, start: int) -> tuple[Node, int]:
        """Follow forks within a page; returns the last node touched and where the match ends."""
        position = start
        while True:
            common = _common_bytes(child.label, data[position : position + len(child.label)])
            position += common
            if common < len(child.label) or not child.is_fork:
                return child, position
            below = child.child(data[position : position + TOKEN_BYTES])
            if below is None:
                return child, position
            child = below

    def _tail(
        self, node: Node, num_bytes: int, no_source: Callable[[PageId], bool] | None
    ) -> tuple[PageId | None, int]:
        """A page to copy the first part of the wanted one from, and how much of it, in bytes.

        Args:
            node: Where the match ends, `num_bytes` into the page.
        """
        while True:
            page = self._any_page(node, no_source)
            above = node.parent
            if page is not None:
                return page, num_bytes
            if above is None or not above.is_fork:
                return None, 0
            node, num_bytes = above, above.end * TOKEN_BYTES

    def _any_page(self, node: Node, no_source: Callable[[PageId], bool] | None) -> PageId | None:
        """A page on the device that begins with a node's tokens, if one of the first has it."""
        nodes = [node]
        for _ in range(MAX_NODES_TRIED):
            if not nodes:
                return None
            tried = nodes.pop()
            if tried.page is not None and (no_source is None or not no_source(tried.page)):
                return tried.page
            if tried.is_fork:
                below = tried.some_children(MAX_CHILDREN_TRIED)
                nodes += sorted(below, key=lambda child: child.page is not None)
        return None

    def _attach(
        self, parent: Node, label: bytes, page: PageId | None, key: bytes, data: bytes
    ) -> Node:
        node = Node(parent, label, page, len(data) // TOKEN_BYTES, key)
        parent.put(node)
        self.num_nodes += 1
        return node

    def _split(self, child: Node, at: int) -> Node:
        """Put a fork `at` bytes into a child's label."""
        parent = child.parent
        assert parent is not None
        end = child.end - (len(child.label) - at) // TOKEN_BYTES
        fork = Node(parent, child.label[:at], None, end, b"")
        parent.put(fork)
        child.label = child.label[at:]
        child.parent = fork
        fork.put(child)
        self.num_nodes += 1
        return fork

    def _merge(self, fork: Node, child: Node) -> None:
        """Take out a fork that no longer parts anything."""
        above = fork.parent
        assert above is not None
        child.label = fork.label + child.label
        child.parent = above
        above.put(child)
        self.num_nodes -= 1
