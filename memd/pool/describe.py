"""Listings of the pool for the operator: blocks and prefixes; no text and no token ids."""

import hashlib
from typing import Any

from memd.pool.pages import PageState
from memd.pool.pool import Pool
from memd.pool.prefix_tree import Node
from memd.types import PageId

MAX_NODES_VISITED = 50_000  # bounds the time a listing takes from the step loop


def blocks(pool: Pool, offset: int, limit: int) -> dict[str, Any]:
    """Blocks `[offset, offset + limit)` in physical order, with their pages by state."""
    last = min(offset + limit, pool.blocks.num_blocks)
    return {
        "total": pool.blocks.num_blocks,
        "blocks": [_block(pool, number) for number in range(offset, last)],
    }


def _block(pool: Pool, number: int) -> dict[str, Any]:
    size = pool.blocks.pages_per_block
    pages = range(number * size, min((number + 1) * size, pool.capacity_pages))
    counts = {"active": 0, "cached": 0, "quarantined": 0, "free": 0}
    tokens = shared = 0
    for page in pages:
        state = pool.pages.state[page]
        if pool.pages.refs[page]:
            counts["active"] += 1
            shared += pool.pages.refs[page] > 1
        elif state == PageState.SEALED:
            counts["cached"] += 1
        else:
            counts["quarantined" if state == PageState.QUARANTINED else "free"] += 1
        tokens += pool.pages.tokens[page] if state == PageState.SEALED else 0
    return {
        "block": number,
        "committed": pool.blocks.is_committed(number),
        "pages": counts,
        "shared_pages": shared,
        "sealed_tokens": tokens,
    }


def prefixes(pool: Pool, limit: int) -> dict[str, Any]:
    """The largest stretches of the prefix tree between two branchings, by tokens.

    Namespaces are shown as short digests: a salt is a secret.
    """
    found: list[dict[str, Any]] = []
    visited = 0
    for namespace in pool.tree.namespaces():
        digest = hashlib.blake2b(namespace.encode(), digest_size=4).hexdigest()
        stack = [(child, 0) for child in pool.tree.root(namespace).children]
        while stack and visited < MAX_NODES_VISITED:
            node, start = stack.pop()
            stretch = [node]
            while len(stretch[-1].children) == 1:
                stretch += stretch[-1].children
            visited += len(stretch)
            found.append({"namespace": digest, **_stretch(pool, stretch, start)})
            end = start + found[-1]["tokens"]
            stack += [(child, end) for child in stretch[-1].children]
    found.sort(key=lambda entry: entry["tokens"], reverse=True)
    return {
        "prefixes": found[:limit],
        "complete": visited < MAX_NODES_VISITED and len(found) <= limit,
    }


def _stretch(pool: Pool, stretch: list[Node], start: int) -> dict[str, Any]:
    pages = [node.page for node in stretch if node.page is not None]
    refs = pool.pages.refs
    return {
        "id": f"{stretch[-1].key & 0xFFFFFFFFFFFFFFFF:016x}",
        "start_token": start,
        "tokens": sum(len(node.label) for node in stretch) // 4,
        "pages": len(pages),
        "held_pages": sum(1 for page in pages if refs[PageId(page)]),
        "holders": max((refs[PageId(page)] for page in pages), default=0),
        "branches": len(stretch[-1].children),
    }
