"""Brings pages to the disk and back, through the tiers above it."""

from collections.abc import Sequence
from itertools import islice

from memd.pool.blocks import Blocks
from memd.pool.counters import PoolCounters
from memd.pool.disk import DiskTier
from memd.pool.files import DiskReport, FileReport, PageFile
from memd.pool.host_slots import HostSlots
from memd.pool.pages import Pages
from memd.pool.prefix_tree import Node, PrefixTree
from memd.pool.residency import Residency

MAX_STARTED = 64  # pages looked at in one step
MAX_WRITES = 128  # under way at once


class DiskTraffic:
    """Starts writes and reads of page files, and settles what has ended.

    Args:
        disk, residency, host, tree, pages, blocks, counters: Of one pool.
    """

    def __init__(
        self,
        disk: DiskTier,
        residency: Residency,
        host: HostSlots,
        tree: PrefixTree,
        pages: Pages,
        blocks: Blocks,
        counters: PoolCounters,
    ) -> None:
        self._disk = disk
        self._residency = residency
        self._host = host
        self._tree = tree
        self._pages = pages
        self._blocks = blocks
        self._counters = counters

    def advance(self, reports: Sequence[DiskReport]) -> None:
        """Settle what has ended, then start to write what is wanted as far as there are slots."""
        for report in reports:
            if isinstance(report, FileReport):
                self._finish(report)
            else:
                self._disk.found(report)
        disk = self._disk
        if not disk.wanted or not disk.index.complete or disk.fault is not None:
            return
        being_read = disk.being_read()
        for node in list(islice(disk.wanted, MAX_STARTED)):
            if node.key in disk.writing:
                continue  # to be removed again and wanted again, or packed since
            is_gone = node.page is None and (node.host is None or node in disk.reading)
            if is_gone or disk.has(node, self._is_packed(node)):
                del disk.wanted[node]
            elif node.key in being_read:
                continue  # whoever reads the file expects what it holds now
            elif len(disk.writing) >= min(MAX_WRITES, self._host.staging):
                return
            elif node.host is not None and not self._is_old(node):
                del disk.wanted[node]
                disk.write(node)
            elif node.page in self._residency.unsaved:
                del disk.wanted[node]
                self._counters.disk_dropped["failed"] += 1
            elif not self._save(node):
                return

    def _is_packed(self, node: Node) -> bool:
        """Whether what would be written is a packed page."""
        if node.page is not None:
            return self._blocks.is_packed(node.page)
        return node.host in self._host.packed

    def _is_old(self, node: Node) -> bool:
        """Whether a node's host copy was made before its page was packed."""
        if node.page is None or node.host is None or node.host in self._host.packed:
            return False
        return self._blocks.is_packed(node.page)

    def _save(self, node: Node) -> bool:
        """Have a page copied to the host; False when there is no slot."""
        if node.host is not None:
            self._residency.give_up(node)
        leaves = node.page in self._residency.leaving
        return leaves or self._residency.write_back(node, None)

    def read(self, parent: Node, files: Sequence[PageFile], owner: int, ahead: bool) -> None:
        """Order to read the pages that follow a node, as far as there are slots.

        Args:
            parent: The root, or the node of the page before them.
            files: In order.
            owner: Number of the tenant they are for.
            ahead: Nobody waits for them yet: they get free slots only.
        """
        if parent.page is None and parent.host is None and not parent.is_root:
            return
        for file in files:
            full = self._host.used >= self._host.room
            if full and (ahead or not self._residency.evict_host_copy()):
                return
            node, superseded = self._tree.insert(parent, file.tokens, None)
            assert node is not None
            if superseded is not None and self._pages.detach(superseded):
                self._blocks.put([superseded])
            node.host = self._host.take(node, self._host.staging)
            if file.packed and node.host is not None:
                self._host.packed.add(node.host)
            node.owner = owner
            self._residency.host_only += 1
            self._disk.read(node, file)
            parent = node

    def _finish(self, report: FileReport) -> None:
        """A transfer has ended. One that nobody knows is only counted."""
        move = self._disk.finish(report)
        if move is None or move.node is None:
            return
        node, transfer = move.node, move.transfer
        if transfer.path == "h2f":
            self._residency.let_pass(node)
        elif report.fault is not None or report.bad is not None:
            self._residency.give_up(node)
        elif node.page is not None:  # computed again meanwhile
            self._counters.prefetched["late"] += 1
            self._residency.let_pass(node)
        else:
            self._host.from_disk.add(transfer.slot)
