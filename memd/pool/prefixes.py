"""The prefix tree for the operator: its prefixes, and what a prompt would find in it.

A *prefix* here is a stretch of pages between two branchings, named by its first page, so that it
keeps its name while a chat grows. Names last as long as that page's content stays in the tree; no
text and no token ids leave the pool.
"""

import hashlib
import math
import re
from array import array
from dataclasses import dataclass
from itertools import chain
from typing import Any

from memd.pool.keys import page_key
from memd.pool.misses import elsewhere, goes_on
from memd.pool.pins import Pin
from memd.pool.pool import Pool
from memd.pool.prefix_tree import HEAT_HALF_LIFE_SECONDS, Node
from memd.types import PageId, PrefixOrder

MAX_NODES_VISITED = 50_000  # bounds the time a listing takes from the step loop
MAX_NAMESPACES_TRIED = 1000
_NAME_BYTES = 8
_PER_HOUR = math.log(2) * 3600 / HEAT_HALF_LIFE_SECONDS


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Nodes of pages from the one after a branching to the next branching or leaf."""

    namespace: str
    nodes: list[Node]
    start_token: int
    above: "_Stretch | None"

    @property
    def tokens(self) -> int:
        return sum(node.end for node in self.nodes)


def prefix_id(first: Node) -> str:
    """The name of the prefix that begins with a node's page."""
    return first.key[:_NAME_BYTES].hex()


def find_prefix(pool: Pool, name: str) -> list[Node]:
    """The nodes of the prefix that has the page of that name, first page first. O(pages).

    Empty when the page is not in the tree.
    """
    if not re.fullmatch("[0-9a-f]{16}", name):
        return []
    key = bytes.fromhex(name)
    on_device = (node for node in pool.pages.node if node is not None)
    on_host = (node for node in pool.host.holders().values() if node.host is not None)
    found = next((node for node in chain(on_device, on_host) if node.key.startswith(key)), None)
    return [] if found is None else stretch_of(pool, found)


def stretch_of(pool: Pool, node: Node) -> list[Node]:
    """The nodes of the prefix that a page's node is part of, first page first."""
    tree = pool.tree
    first = node
    while not (above := tree.page_parent(first)).is_root and len(tree.page_children(above)) == 1:
        first = above
    nodes = [first]
    while len(below := tree.page_children(nodes[-1])) == 1:
        nodes += below
    return nodes


def list_prefixes(
    pool: Pool,
    limit: int,
    sort: PrefixOrder = "tokens",
    tenant: str | None = None,
    pinned: bool | None = None,
) -> dict[str, Any]:
    """Prefixes, largest of `sort` first (`start`: in the order of the tree, parents first).

    Args:
        pool: Read only.
        limit: Most rows.
        sort: By what.
        tenant: Only those charged to this tenant.
        pinned: Only those with, or without, a pin.
    """
    stretches, complete = _stretches(pool)
    pins, now = pool.pins.covering(), pool.now()
    rows = [_row(pool, stretch, pins, now) for stretch in stretches]
    if tenant is not None:
        rows = [row for row in rows if row["tenant"] == tenant]
    if pinned is not None:
        rows = [row for row in rows if row["pinned"] is pinned]
    if sort == "last_hit":
        rows.sort(key=lambda row: _or_infinity(row["last_hit_age_seconds"]))
    elif sort != "start":
        rows.sort(key=lambda row: row[sort], reverse=True)
    return {
        "prefixes": rows[:limit],
        "total": len(rows),
        "complete": complete and len(rows) <= limit,
        "pin_limit_pages": pool.pins.limit_pages,
        "promised_pages": pool.pins.promised_pages,
    }


def explain(pool: Pool, tokens: "array[int]", namespace: str) -> dict[str, Any]:
    """What a prompt would find now, by tier, and why no more. Changes nothing.

    Returns:
        Tokens found and to be computed; `first_missing_token`, the position where the match ends;
        `reason`: `complete`, `differs` (something else follows there), `unseen` (nothing does),
        `evicted` (it was there), `awaited` (another computes it now), `isolated` (another salt or
        tenant has more of it); `nearest`: the prefix that the match ends in.
    """
    match = pool.match(tokens, namespace)
    page_tokens = pool.layout.page_tokens
    on_host = len(match.missing) * page_tokens
    on_disk = len(match.files) * page_tokens
    end = match.nodes[-1] if match.nodes else pool.tree.root(namespace)
    elsewhere_tokens = elsewhere(pool, tokens, namespace, MAX_NAMESPACES_TRIED)
    evicted_age = _evicted_age(pool, tokens, end, len(match.nodes) * page_tokens)
    if match.num_tokens >= len(tokens) - 1:  # the last token is always computed
        reason = "complete"
    elif match.awaited:
        reason = "awaited"
    elif evicted_age is not None:
        reason = "evicted"
    elif elsewhere_tokens > match.num_tokens:
        reason = "isolated"
    else:
        reason = "differs" if goes_on(pool, match, namespace) else "unseen"
    return {
        "prompt_tokens": len(tokens),
        "hit_tokens": {
            "device": match.num_tokens - on_host - on_disk,
            "host": on_host,
            "disk": on_disk,
        },
        "computed_tokens": len(tokens) - match.num_tokens,
        "copied_tokens": match.tail_tokens,
        "first_missing_token": match.num_tokens,
        "reason": reason,
        "evicted_age_seconds": evicted_age,
        "elsewhere_tokens": elsewhere_tokens,
        "namespace": _digest(namespace),
        "nearest": _nearest(pool, end),
    }


def _evicted_age(pool: Pool, tokens: "array[int]", end: Node, start: int) -> float | None:
    """Seconds since the page that would continue a match was evicted, as far as is remembered."""
    label = tokens[start : start + pool.layout.page_tokens].tobytes()
    return pool.ghosts.age(page_key(end.key, label), pool.now())


def _nearest(pool: Pool, end: Node) -> dict[str, Any] | None:
    """The prefix that a match ends in: its name and how many tokens it has from the root on."""
    if end.is_root:
        return None
    nodes = stretch_of(pool, end)
    tokens, node = 0, nodes[-1]
    while not node.is_root:
        tokens += node.end
        node = pool.tree.page_parent(node)
    branches = len(pool.tree.page_children(nodes[-1]))
    return {"id": prefix_id(nodes[0]), "tokens": tokens, "branches": branches}


def _stretches(pool: Pool) -> tuple[list[_Stretch], bool]:
    """All prefixes, parents first, and whether these are all."""
    found: list[_Stretch] = []
    visited = 0
    for namespace in pool.tree.namespaces():
        stack: list[tuple[Node, int, _Stretch | None]] = [
            (child, 0, None) for child in pool.tree.page_children(pool.tree.root(namespace))
        ]
        while stack:
            if visited >= MAX_NODES_VISITED:
                return found, False
            node, start, above = stack.pop()
            nodes = [node]
            below = pool.tree.page_children(node)
            while len(below) == 1 and visited + len(nodes) < MAX_NODES_VISITED:
                nodes += below
                below = pool.tree.page_children(nodes[-1])
            visited += len(nodes)
            stretch = _Stretch(namespace, nodes, start, above)
            found.append(stretch)
            end = start + stretch.tokens
            stack += [(child, end, stretch) for child in below]
    return found, True


def _row(pool: Pool, stretch: _Stretch, pins: dict[Node, Pin], now: float) -> dict[str, Any]:
    refs = pool.pages.refs
    on_device = [node.page for node in stretch.nodes if node.page is not None]
    first = stretch.nodes[0]
    repeated = [page for page in on_device for _ in range(refs[page] - 1)]
    active = sum(1 for page in on_device if refs[page])
    pin = pins.get(first)
    above = stretch.above
    return {
        "id": prefix_id(first),
        "parent_id": None if above is None else prefix_id(above.nodes[0]),
        "namespace": _digest(stretch.namespace),
        "tenant": pool.tenants.names[first.owner],
        "start_token": stretch.start_token,
        "tokens": stretch.tokens,
        "pages": len(on_device),
        "host_pages": sum(1 for node in stretch.nodes if node.host is not None),
        "host_only_pages": len(stretch.nodes) - len(on_device),
        "bytes": _bytes(pool, on_device),
        "active_pages": active,
        "pinned_pages": sum(1 for page in on_device if pool.pages.pins[page]),
        "holders": max((refs[page] for page in on_device), default=0),
        "deduplicated_bytes": _bytes(pool, repeated),
        "branches": len(pool.tree.page_children(stretch.nodes[-1])),
        "hits": first.hits,
        "hits_per_hour": round(first.heat_at(now) * _PER_HOUR, 3),
        "last_hit_age_seconds": now - first.hit_at if first.hits else None,
        "pinned": pin is not None,
        "pin_label": pin.label or None if pin is not None else None,
        "pin_left_seconds": (
            None if pin is None or pin.expires_at is None else max(0.0, pin.expires_at - now)
        ),
    }


def _bytes(pool: Pool, pages: list[PageId]) -> int:
    """Bytes of pages, each in its format."""
    packed = pool.blocks.count_packed(pages)
    sizes = pool.layout.page_bytes, pool.layout.size_bytes(packed=True)
    return (len(pages) - packed) * sizes[0] + packed * sizes[1]


def _or_infinity(value: float | None) -> float:
    return math.inf if value is None else value


def _digest(namespace: str) -> str:
    """A namespace as it is shown: the salt in it is a secret."""
    return hashlib.blake2b(namespace.encode(), digest_size=4).hexdigest()
