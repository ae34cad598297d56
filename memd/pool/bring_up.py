"""Orders what a prefix has in lower tiers only to be brought up."""

from collections.abc import Callable

from memd.errors import PoolExhausted
from memd.pool.allocator import Allocator
from memd.pool.blocks import Blocks
from memd.pool.disk import DiskTier
from memd.pool.disk_traffic import DiskTraffic
from memd.pool.lru import LruEviction
from memd.pool.pages import Pages
from memd.pool.residency import Residency
from memd.pool.sequence import PrefixMatch


class BringUp:
    """Host pages to the device, files to the host.

    Args:
        allocator, residency, disk, traffic, pages, lru, blocks: Of one pool.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        allocator: Allocator,
        residency: Residency,
        disk: DiskTier,
        traffic: DiskTraffic,
        pages: Pages,
        lru: LruEviction,
        blocks: Blocks,
        clock: Callable[[], float],
    ) -> None:
        self._allocator = allocator
        self._residency = residency
        self._disk = disk
        self._traffic = traffic
        self._pages = pages
        self._lru = lru
        self._blocks = blocks
        self._clock = clock

    def restore(self, match: PrefixMatch, owner: int, ahead: bool) -> None:
        """Order the copies that are not under way; see `Pool.restore`."""
        coming = self._residency.arriving.keys() | self._disk.reading.keys()
        wanted = [node for node in match.missing if node not in coming]
        present = [node.page for node in match.nodes if node.page is not None]
        cached = sum(1 for page in present if page in self._lru)
        obtainable = self._allocator.obtainable_pages - cached
        if len(wanted) > obtainable:
            raise PoolExhausted(f"{len(wanted)} pages wanted, {obtainable} to be had")
        if wanted:
            if not self._residency.make_room(len(wanted), present):
                return  # asked again in the next step
            self._pages.hold(present)  # making room must not take what it is made for
            try:
                pages = self._allocator.allocate(len(wanted), wanted[0].owner)
                self._residency.restore(wanted, pages)
            finally:
                self._blocks.put(self._pages.drop(present[::-1], self._clock()))
        if match.files and match.end is not None:
            self._traffic.read(match.end, match.files, owner, ahead)
