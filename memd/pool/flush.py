"""Forgetting on an operator's order: all that is cached, or one prefix, in every tier."""

from memd.pool.blocks import Blocks
from memd.pool.disk import DiskTier
from memd.pool.lru import LruEviction
from memd.pool.prefix_tree import Node, PrefixTree
from memd.pool.residency import Residency
from memd.types import PageId


def drop_all(
    residency: Residency, disk: DiskTier, tree: PrefixTree, lru: LruEviction, blocks: Blocks
) -> int:
    """Forget every cached page in every tier; returns how many device pages became free."""
    freed: list[PageId] = []
    moving = [move.node for move in residency.moves.values()] + disk.moving()
    for node in dict.fromkeys(moving):
        if node is None or (node.page is not None and node.page not in lru):
            continue
        if node.page is None and node.host is None:
            continue  # went with one before it
        _drop(residency, node, freed)
        residency.drop_below(node, "admin", freed)
        tree.remove(node)
    blocks.put(freed)
    count = len(freed) + residency.evict_now(len(lru), "admin")
    while residency.evict_host_copy():
        pass
    disk.clear()
    return count


def drop_prefix(
    top: Node, residency: Residency, disk: DiskTier, tree: PrefixTree, blocks: Blocks
) -> tuple[int, int]:
    """Forget a node and what follows it in every tier, except what is held, pinned or moving.

    Returns:
        Device pages freed, and device pages that stay.
    """
    freed: list[PageId] = []
    kept = 0
    nodes = [top]
    for node in nodes:  # grows while it is walked
        nodes += node.children
    for node in reversed(nodes):
        if node.is_fork:
            continue
        busy = node in residency.arriving or node in disk.reading
        busy |= node.page is not None and residency.victim(node.page) is None
        if busy or not node.is_leaf:
            kept += node.page is not None
            continue
        _drop(residency, node, freed)
        disk.remove((node.key,))
        tree.remove(node)
    blocks.put(freed)
    return len(freed), kept


def _drop(residency: Residency, node: Node, freed: list[PageId]) -> None:
    if node.page is not None:
        residency.drop_page(node, node.page, "admin", freed)
    elif node.host is not None:
        residency.host_only -= 1
    if node.host is not None:
        residency.drop_host_copy(node, node.host)
