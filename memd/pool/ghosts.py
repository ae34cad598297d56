"""What was evicted lately, so that a page asked for again can be called regretted."""

from collections import OrderedDict
from collections.abc import Iterable


class Ghosts:
    """Content keys of evicted pages with the time of their eviction.

    Args:
        limit: Most keys kept; the oldest go first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._evicted_at: OrderedDict[bytes, float] = OrderedDict()

    def add(self, key: bytes, now: float) -> None:
        """A page of this content was evicted."""
        self._evicted_at[key] = now
        if len(self._evicted_at) > self._limit:
            self._evicted_at.popitem(last=False)

    def recall(self, keys: Iterable[bytes], now: float, within_seconds: float) -> list[float]:
        """Seconds since each content was evicted, where that is not longer ago; told once."""
        times = [self._evicted_at.pop(key, None) for key in keys]
        ages = [now - evicted_at for evicted_at in times if evicted_at is not None]
        return [age for age in ages if age <= within_seconds]

    def age(self, key: bytes, now: float) -> float | None:
        """Seconds since this content was evicted, without forgetting it."""
        evicted_at = self._evicted_at.get(key)
        return None if evicted_at is None else now - evicted_at
