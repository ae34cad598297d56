"""How many pages may be in use now: what the settings say, what others need, what is promised."""

from collections.abc import Callable

from memd.pool.pool import Pool
from memd.types import LimitWait


class PoolLimit:
    """The limit in force. A lower one takes effect as pages and blocks become free: background
    reclaim evicts to its marks, moves empty blocks, and those go back to the device.

    Requests are never failed for it: the limit stays high enough for the longest of those that were
    accepted, beside what is pinned, until they have ended.

    Args:
        pool: Whose limit it is.
        most_pages: Of the address range.

    Attributes:
        target_pages: To be kept once nothing stands in the way.
    """

    def __init__(self, pool: Pool, most_pages: int) -> None:
        self.most_pages = most_pages
        self.target_pages = pool.configured_pages
        self._pool = pool

    def configure(self, pages: int) -> None:
        """What the settings allow, from now on; at most `most_pages`."""
        self._pool.configured_pages = pages

    def advance(self, cap_pages: int | None, needed_pages: Callable[[], int]) -> None:
        """Put the limit in force, as far as it may be.

        Args:
            cap_pages: What the device has left for the pool; None: as much as it likes.
            needed_pages: Tells what the longest request that was accepted needs at its end.
        """
        pool, configured = self._pool, self._pool.configured_pages
        self.target_pages = configured if cap_pages is None else max(1, min(configured, cap_pages))
        former = pool.blocks.limit_pages
        limit = self.target_pages
        if limit < max(former, configured):
            floor = needed_pages() + pool.pages.pinned + pool.pages.quarantined
            limit = max(limit, min(max(former, configured), floor))
        if limit == former:
            return
        pool.blocks.set_limit(limit)
        if pool.blocks.room_pages > len(pool.pages.state):
            pool.pages.extend(pool.blocks.room_pages)
        pool.pins.capacity_pages = limit

    @property
    def target_blocks(self) -> int:
        """Blocks that hold as many pages as the target."""
        return -(-self.target_pages // self._pool.blocks.pages_per_block)

    @property
    def waits_for(self) -> LimitWait | None:
        """What keeps the pool above its target; None: nothing, it keeps it."""
        pool, target = self._pool, self.target_pages
        # Pages are places, of which packed blocks have more than they take of the limit.
        over = pool.blocks.taken_pages > target
        if over and pool.pages.pinned > target:
            return "pins"
        if pool.blocks.limit_pages > target:
            return "requests"
        if over:
            held = pool.pages.active + pool.pages.pinned
            return "requests" if held > target else "reclaim"
        return "moves" if pool.blocks.committed_blocks > self.target_blocks else None
