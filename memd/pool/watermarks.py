"""When background reclaim works: between the high and the low mark of the occupied ratio."""


class Watermarks:
    """The marks in force, the latch between them, and what is counted about them.

    `high` and `low` may be set between two steps.

    Args:
        high: Occupied ratio at or above which reclaim starts.
        low: Occupied ratio at or below which it stops. 0 < low < high <= 1, checked by the
        settings.
    """

    def __init__(self, high: float, low: float) -> None:
        self.high = high
        self.low = low
        self.reclaiming = False
        self.crossings = {"high.up": 0, "high.down": 0, "low.up": 0, "low.down": 0}
        self.above_seconds = {"high": 0.0, "low": 0.0}
        self._above = {"high": False, "low": False}
        self._observed_at: float | None = None

    def observe(self, occupied_pages: int, capacity_pages: int, now: float) -> None:
        """Account the time since the last call and the crossings up to now."""
        elapsed = 0.0 if self._observed_at is None else max(0.0, now - self._observed_at)
        self._observed_at = now
        ratio = occupied_pages / capacity_pages
        for level, mark in (("high", self.high), ("low", self.low)):
            if self._above[level]:
                self.above_seconds[level] += elapsed
            above = ratio >= mark
            if above != self._above[level]:
                self.crossings[f"{level}.{'up' if above else 'down'}"] += 1
                self._above[level] = above

    def excess_pages(self, occupied_pages: int, capacity_pages: int, evictable_pages: int) -> int:
        """How many pages background reclaim has still to make free now; 0 when it rests.

        Starts at the high mark, ends at the low mark or when nothing is left that could be evicted,
        so that a mark which cannot be reached never keeps the worker busy (cases: Alluxio #6867).
        """
        if occupied_pages >= self.high * capacity_pages:
            self.reclaiming = True
        excess = occupied_pages - int(self.low * capacity_pages)
        if excess <= 0 or not evictable_pages:
            self.reclaiming = False
        return min(excess, evictable_pages) if self.reclaiming else 0
