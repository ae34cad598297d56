"""A cumulative histogram in plain Python, cheap enough for the step loop."""

from bisect import bisect_left
from collections.abc import Sequence

# Bucket bounds in seconds, by what they measure.
LATENCY = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
STEP = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.2, 0.5, 1.0),
)
MICRO = (
    *(1e-05, 2.5e-05, 5e-05, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 1.0),
)
RESIDENCE = (
    *(0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0),
    *(14400.0, 86400.0),
)

TRANSFER = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
TOKEN_GAP = (
    *(0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
)
DURATION = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
JOB = (0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)

# In tokens.
LENGTH = (1.0, 16.0, 64.0, 256.0, *(float(1024 << doubling) for doubling in range(9)))


class HistogramCounts:
    """Counts of observations by bucket.

    Args:
        buckets: Upper bounds, ascending, without +Inf.
    """

    __slots__ = ("buckets", "counts", "total")

    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)  # the last one is +Inf
        self.total = 0.0

    def observe(self, *values: float) -> None:
        """Count values; a negative one, from a clock that was set back, counts as 0."""
        buckets, counts = self.buckets, self.counts
        for value in values:
            counts[bisect_left(buckets, value)] += 1
            self.total += max(0.0, value)
