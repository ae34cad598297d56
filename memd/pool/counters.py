"""What the pool counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from memd.histogram import MICRO, RESIDENCE, TRANSFER, HistogramCounts
from memd.types import (
    BadFile,
    DiskFault,
    DropPolicy,
    EvictionReason,
    FilePath,
    PinOutcome,
    Tier,
    TransferPath,
)

PATHS: tuple[TransferPath | FilePath, ...] = get_args(TransferPath) + get_args(FilePath)


@dataclass(slots=True)
class PoolCounters:
    """Running totals since the start. Pages unless a name says otherwise.

    Attributes:
        page_bytes: Sizes of a full and of a packed page.
    """

    page_bytes: tuple[int, int] = (0, 0)
    allocations: dict[str, int] = field(
        default_factory=lambda: {"free": 0, "evicted": 0, "failed": 0}
    )
    evicted: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(EvictionReason), 0)
    )
    offloaded: dict[str, int] = field(  # of the evicted: still on the host
        default_factory=lambda: dict.fromkeys(get_args(EvictionReason), 0)
    )
    dropped: dict[str, int] = field(  # while in use
        default_factory=lambda: dict.fromkeys(get_args(DropPolicy), 0)
    )
    host_evicted: int = 0
    transfers: dict[tuple[str, str], int] = field(
        default_factory=lambda: {
            (path, outcome): 0 for path in PATHS for outcome in ("ok", "failed")
        }
    )
    transferred_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PATHS, 0))
    transfer_seconds: dict[str, HistogramCounts] = field(
        default_factory=lambda: {path: HistogramCounts(TRANSFER) for path in PATHS}
    )
    disk_evicted: int = 0
    disk_dropped: dict[str, int] = field(  # pages that were to be written and were not
        default_factory=lambda: dict.fromkeys((*get_args(DiskFault), "limit", "busy"), 0)
    )
    disk_rejected: dict[str, int] = field(  # files that were no hits, and are removed
        default_factory=lambda: dict.fromkeys(get_args(BadFile), 0)
    )
    late_transfers: int = 0  # reports of copies that nobody waits for
    prefetched: dict[str, int] = field(
        default_factory=lambda: {"used": 0, "late": 0, "wasted": 0, "cancelled": 0}
    )
    packed: int = 0
    packing_failed: int = 0  # left full, as they could not be written
    packing_no_room: int = 0  # left full for the time being, as there was no room
    eviction_passes: int = 0
    regretted: int = 0
    query_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0})
    miss_tokens: dict[str, int] = field(
        default_factory=lambda: {"cold": 0, "evicted": 0, "final": 0}
    )
    copies: int = 0
    pins: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(PinOutcome), 0))
    allocation_seconds: HistogramCounts = field(default_factory=lambda: HistogramCounts(MICRO))
    eviction_pass_seconds: HistogramCounts = field(default_factory=lambda: HistogramCounts(MICRO))
    lifetime_seconds: HistogramCounts = field(default_factory=lambda: HistogramCounts(RESIDENCE))
    idle_seconds: HistogramCounts = field(default_factory=lambda: HistogramCounts(RESIDENCE))
    evict_to_reuse_seconds: HistogramCounts = field(
        default_factory=lambda: HistogramCounts(RESIDENCE)
    )

    def count_transfer(
        self, path: TransferPath | FilePath, succeeded: bool, seconds: float, packed: bool = False
    ) -> None:
        """Count a copy of a page of a format that has ended, so long after it was ordered."""
        self.transfers[path, "ok" if succeeded else "failed"] += 1
        if succeeded:
            self.transferred_bytes[path] += self.page_bytes[packed]
        self.transfer_seconds[path].observe(seconds)

    def count_lookup(
        self,
        num_tokens: int,
        cached_tokens: int,
        restored_tokens: Mapping[Tier, int],
        regretted_tokens: int,
    ) -> None:
        """Count a lookup by what was found where, so that hits and misses sum to queries."""
        self.query_tokens += num_tokens
        self.hit_tokens["device"] += cached_tokens - sum(restored_tokens.values())
        for tier, count in restored_tokens.items():
            self.hit_tokens[tier] += count
        missed = num_tokens - cached_tokens - 1  # the last is always computed
        evicted = min(missed, regretted_tokens)
        self.miss_tokens["final"] += 1
        self.miss_tokens["evicted"] += evicted
        self.miss_tokens["cold"] += missed - evicted

    def count_evictions(
        self, lifetimes_seconds: list[float], idle_seconds: list[float], took_seconds: float
    ) -> None:
        """Count one pass of eviction, by what it freed."""
        self.lifetime_seconds.observe(*lifetimes_seconds)
        self.idle_seconds.observe(*idle_seconds)
        self.eviction_passes += 1
        self.eviction_pass_seconds.observe(took_seconds)
