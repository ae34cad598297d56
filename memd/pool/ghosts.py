"""What was evicted lately, so that a page asked for again can be called regretted."""

from collections import OrderedDict


class Ghosts:
    """Content keys of evicted pages with the time of their eviction.

    Args:
        limit: Most keys kept; the oldest go first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._evicted_at: OrderedDict[int, float] = OrderedDict()

    def add(self, key: int, now: float) -> None:
        """A page of this content was evicted."""
        self._evicted_at[key] = now
        if len(self._evicted_at) > self._limit:
            self._evicted_at.popitem(last=False)

    def recall(self, key: int, now: float) -> float | None:
        """Seconds since this content was evicted, told once; None if nothing is known of it."""
        evicted_at = self._evicted_at.pop(key, None)
        return None if evicted_at is None else now - evicted_at
