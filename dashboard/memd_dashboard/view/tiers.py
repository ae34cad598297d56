"""Tiers and the copies between them."""

from typing import Any

from memd_dashboard import show
from memd_dashboard.markup import Bar, Card
from memd_dashboard.scrape import Window
from memd_dashboard.snapshot import JSON

PATHS = {"d2h": "device → host", "h2d": "host → device", "h2f": "host → disk", "f2h": "disk → host"}
EVICTED = {
    "watermark": "by reclaim in the background, above the high mark",
    "ahead": "in the background, for what is about to be needed",
    "allocation": "by a request that found nothing free: it had to wait for it",
    "quota": "from a tenant above its quota",
    "admin": "by an operator",
}
PREFETCHED = {
    "used": "were there in time",
    "late": "came after their request had to wait",
    "wasted": "were not needed after all",
    "cancelled": "were called off",
}


def cards(pool: JSON, window: Window) -> list[Card]:
    """Figures of the tiers."""
    page_bytes = (pool.get("layout") or {}).get("page_bytes", 0)
    device = (
        pool.get("capacity_pages"),
        (pool.get("capacity_pages") or 0) - (pool.get("free_pages") or 0),
    )
    host = pool.get("host_capacity_pages"), pool.get("host_used_pages") or 0
    moving = pool.get("transfers_under_way") or {}
    limit, used = pool.get("disk_limit_bytes"), pool.get("disk_used_bytes")
    fault = pool.get("disk_fault")
    return [
        Card("Device", *_used(device, page_bytes), more="occupied"),
        Card("Host", *_used(host, page_bytes), more="used" if host[0] else "no host tier"),
        Card("Disk", *_disk(limit, used), more=f"pauses: {fault}" if fault else ""),
        Card(
            "Dirty pages",
            show.count(pool.get("dirty_pages")),
            "Sealed pages without a copy on the host: evicting those without a file loses them.",
        ),
        Card(
            "Under way",
            show.count(sum(moving.values()) if moving else None),
            "Pages being copied at this moment.",
            ", ".join(f"{PATHS.get(path, path)} {n}" for path, n in moving.items() if n),
        ),
        Card(
            "Regretted",
            show.share(window.ratio("memd_regretted_pages_total", "memd_evicted_pages_total")),
            "Evicted pages that were asked for again within the regret window, as a share of all "
            "evicted in the last five minutes. A high share: the tier below is too small.",
        ),
        Card(
            "Direct reclaim",
            show.count(window.increase("memd_direct_reclaimed_pages_total"), "pages"),
            "Pages that a request had to evict itself, in the last five minutes. Anything but 0 "
            "says that the high mark is too high.",
        ),
    ]


def _used(pair: tuple[int | None, int], page_bytes: int) -> tuple[str, str]:
    capacity, used = pair
    if not capacity:
        return show.UNKNOWN if capacity is None else "off", ""
    return show.share(
        used / capacity
    ), f"{show.size(used * page_bytes)} of {show.size(capacity * page_bytes)}"


def _disk(limit_bytes: int | None, used_bytes: int | None) -> tuple[str, str]:
    if not limit_bytes:
        return "off", ""
    if used_bytes is None:
        return show.UNKNOWN, "its files are being read"
    return (
        show.share(used_bytes / limit_bytes),
        f"{show.size(used_bytes)} of {show.size(limit_bytes)}",
    )


def disk_losses(pool: JSON) -> list[Bar]:
    """Pages that were not written and files that were of no use, since the start."""
    kinds = (("disk_dropped_pages", "not written"), ("disk_rejected_files", "removed"))
    return [
        Bar(f"{words}: {reason}", count, show.count(count))
        for name, words in kinds
        for reason, count in (pool.get(name) or {}).items()
        if count
    ]


def flows(window: Window) -> list[Bar]:
    """Bytes a second on each path, in the last minutes."""
    rates = {
        path: window.rate("memd_transfer_bytes_total", path=path)
        for path in window.by("memd_transfer_bytes_total", "path")
    }
    return [
        Bar(PATHS.get(path, path), rate, f"{show.size(rate)}/s")
        for path, rate in rates.items()
        if rate is not None
    ]


def copies(pool: JSON, window: Window) -> list[dict[str, Any]]:
    """One row a path: finished, failed, how long they take."""
    return [
        {
            "path": PATHS.get(path, path),
            "copied pages": counts.get("ok"),
            "failed": counts.get("failed"),
            "p50": show.duration(window.quantile(0.5, "memd_transfer_seconds", path=path)),
            "p99": show.duration(window.quantile(0.99, "memd_transfer_seconds", path=path)),
            "under way": (pool.get("transfers_under_way") or {}).get(path),
        }
        for path, counts in (pool.get("transfers") or {}).items()
    ]


def prefetched(pool: JSON) -> list[Bar]:
    """Pages that were brought up ahead of a request, by how that ended."""
    counts = pool.get("prefetched_pages") or {}
    return [
        Bar(name, counts[name], show.count(counts[name], "pages"), words)
        for name, words in PREFETCHED.items()
        if name in counts
    ]


def evictions(window: Window) -> list[Bar]:
    """Evicted pages by reason, in the last minutes."""
    found = {
        reason: window.increase("memd_evicted_pages_total", reason=reason) or 0.0
        for reason in window.by("memd_evicted_pages_total", "reason")
    }
    return [
        Bar(reason, grown, show.count(grown, "pages"), EVICTED.get(reason, ""))
        for reason, grown in sorted(found.items(), key=lambda item: -item[1])
    ]
