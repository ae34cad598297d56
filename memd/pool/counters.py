"""What the pool counts."""

from dataclasses import dataclass, field

from memd.histogram import MICRO, RESIDENCE, HistogramCounts


@dataclass(slots=True)
class PoolCounters:
    """Running totals since the start. Pages unless a name says otherwise."""

    allocations: dict[str, int] = field(
        default_factory=lambda: {"free": 0, "evicted": 0, "failed": 0}
    )
    evicted: dict[str, int] = field(
        default_factory=lambda: {"watermark": 0, "allocation": 0, "admin": 0}
    )
    eviction_passes: int = 0
    regretted: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    miss_tokens: dict[str, int] = field(
        default_factory=lambda: {"cold": 0, "evicted": 0, "final": 0}
    )
    copies: int = 0
    allocation_seconds: HistogramCounts = field(default_factory=lambda: HistogramCounts(MICRO))
    eviction_pass_seconds: HistogramCounts = field(default_factory=lambda: HistogramCounts(MICRO))
    lifetime_seconds: HistogramCounts = field(default_factory=lambda: HistogramCounts(RESIDENCE))
    idle_seconds: HistogramCounts = field(default_factory=lambda: HistogramCounts(RESIDENCE))
    evict_to_reuse_seconds: HistogramCounts = field(
        default_factory=lambda: HistogramCounts(RESIDENCE)
    )
