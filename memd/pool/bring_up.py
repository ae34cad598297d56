"""Orders what a prefix has in lower tiers only to be brought up."""

from collections.abc import Callable, Sequence
from itertools import takewhile

from memd.errors import PoolExhausted
from memd.pool.allocator import Allocator
from memd.pool.blocks import Blocks
from memd.pool.disk import DiskTier
from memd.pool.disk_traffic import DiskTraffic
from memd.pool.pages import Pages
from memd.pool.prefix_tree import Node
from memd.pool.residency import Residency
from memd.pool.sequence import PrefixMatch
from memd.types import PageId, SlotId


class BringUp:
    """Host pages to the device, files to the host.

    Args:
        allocator, residency, disk, traffic, pages, blocks: Of one pool.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        allocator: Allocator,
        residency: Residency,
        disk: DiskTier,
        traffic: DiskTraffic,
        pages: Pages,
        blocks: Blocks,
        clock: Callable[[], float],
    ) -> None:
        self._allocator = allocator
        self._residency = residency
        self._disk = disk
        self._traffic = traffic
        self._pages = pages
        self._blocks = blocks
        self._clock = clock

    def restore(self, match: PrefixMatch, owner: int, ahead: bool) -> None:
        """Order the copies that are not under way; see `Pool.restore`."""
        coming = self._residency.arriving.keys() | self._disk.reading.keys()
        # A pin may wait for pages of which the later ones have been lost meanwhile.
        there = takewhile(lambda node: node.host is not None, match.missing)
        wanted = [node for node in there if node not in coming]
        present = [node.page for node in match.nodes if node.page is not None]
        num_packed = sum(1 for node in wanted if node.host in self._residency.host.packed)
        num_full = len(wanted) - num_packed
        obtainable = self._allocator.obtainable_pages(present)
        if num_full > obtainable:
            raise PoolExhausted(f"{num_full} pages wanted, {obtainable} to be had")
        if num_packed and num_packed > (most := self._allocator.obtainable_packed_pages(present)):
            raise PoolExhausted(f"{num_packed} packed pages wanted, {most} to be had")
        if wanted:
            # Making room must not take what it is made for: neither host copies nor pages.
            room = min(self.full_pages_for(wanted), obtainable)
            if not self._make_room(room, [node.host for node in wanted], present):
                return  # asked again in the next step
            self._pages.hold(present)
            try:
                pages = self._allocate(wanted, num_full, present)
                self._residency.restore(wanted, pages)
            finally:
                self._blocks.put(self._pages.drop(present[::-1], self._clock()))
        if match.files and match.end is not None:
            self._traffic.read(match.end, match.files, owner, ahead)

    def full_pages_for(self, nodes: Sequence[Node]) -> int:
        """Full pages that bringing host copies of nodes up takes."""
        packed = sum(1 for node in nodes if node.host in self._residency.host.packed)
        return len(nodes) - packed + self._allocator.full_pages_for(packed)

    def _make_room(self, num_pages: int, slots: list[SlotId | None], present: list[PageId]) -> bool:
        if num_pages <= 0:
            return True
        host, pinned = self._residency.host, [slot for slot in slots if slot is not None]
        for slot in pinned:
            host.pin(slot)
        try:
            return self._allocator.make_room(num_pages, present)
        finally:
            for slot in pinned:
                host.unpin(slot)

    def _allocate(self, wanted: list[Node], num_full: int, present: list[PageId]) -> list[PageId]:
        """A page for each node, of the format of its host copy."""
        owner, num_packed = wanted[0].owner, len(wanted) - num_full
        packed = self._allocator.allocate_packed(num_packed, owner, present)
        try:
            if num_full > (obtainable := self._allocator.obtainable_pages()):
                raise PoolExhausted(f"{num_full} pages wanted, {obtainable} to be had")
            full = self._allocator.allocate(num_full, owner, present)
        except PoolExhausted:
            self._blocks.put(self._pages.drop(packed, self._clock()))
            raise
        in_packed = self._residency.host.packed
        return [(packed if node.host in in_packed else full).pop() for node in wanted]
