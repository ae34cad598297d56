"""What the pool counts."""

from dataclasses import dataclass, field
from typing import get_args

from memd.histogram import MICRO, RESIDENCE, HistogramCounts
from memd.types import EvictionReason


@dataclass(slots=True)
class PoolCounters:
    """Running totals since the start. Pages unless a name says otherwise."""

    allocations: dict[str, int] = field(
        default_factory=lambda: {"free": 0, "evicted": 0, "failed": 0}
    )
    evicted: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(EvictionReason), 0)
    )
    offloaded: dict[str, int] = field(  # of the evicted: still on the host
        default_factory=lambda: dict.fromkeys(get_args(EvictionReason), 0)
    )
    host_evicted: int = 0
    transfers: dict[tuple[str, str], int] = field(
        default_factory=lambda: {
            (path, outcome): 0 for path in ("d2h", "h2d") for outcome in ("ok", "failed")
        }
    )
    late_transfers: int = 0  # reports of copies that nobody waits for
    prefetched: dict[str, int] = field(
        default_factory=lambda: {"used": 0, "late": 0, "wasted": 0, "cancelled": 0}
    )
    eviction_passes: int = 0
    regretted: int = 0
    query_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0})
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

    def count_lookup(
        self, num_tokens: int, device_tokens: int, host_tokens: int, regretted_tokens: int
    ) -> None:
        """Count a lookup by what was found where, so that hits and misses sum to queries."""
        self.query_tokens += num_tokens
        self.hit_tokens["device"] += device_tokens
        self.hit_tokens["host"] += host_tokens
        missed = num_tokens - device_tokens - host_tokens - 1  # the last is always computed
        evicted = min(missed, regretted_tokens)
        self.miss_tokens["final"] += 1
        self.miss_tokens["evicted"] += evicted
        self.miss_tokens["cold"] += missed - evicted
