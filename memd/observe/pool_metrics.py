"""Metrics of the pool: what its memory holds, and what has become of it."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from memd.engine.snapshot_types import PoolSnapshot
from memd.observe.catalog.pool import LEVEL
from memd.observe.families import by_label, counter, gauge, histogram
from memd.observe.registry import FAMILIES

GPU = "0"  # the one device of this daemon's engine
Layout = Mapping[str, int]  # sizes by name, as the engine tells them when it is ready


def pool_metrics(
    model: str, pool: PoolSnapshot | None, layout: Layout | None, shrinking: bool = False
) -> Iterator[Metric]:
    """All families of the pool, its prefix tree and its audits.

    Args:
        model: Served name.
        pool: As last reported; None: counters are at zero, gauges absent.
        layout: `Ready.pool`; None: what follows from it is absent.
        shrinking: The pool is above its limit, which was lowered.
    """
    if layout is not None:
        yield gauge("memd_pool_block_size_bytes", [((), layout["block_bytes"])])
        yield gauge("memd_pool_page_size_bytes", [((), layout["page_bytes"])])
        yield gauge("memd_pool_page_tokens", [((), layout["page_tokens"])])
    if pool is not None:
        yield from _gauges(pool, layout)
        yield from _states(pool, layout, shrinking)
        yield from _prefix_gauges(model, pool)
    yield from _pressure(pool)
    yield from _eviction(pool)
    yield from _prefix(model, pool)
    yield from _pins(pool)
    yield from _audits(pool)


def _gauges(pool: PoolSnapshot, layout: Layout | None) -> Iterator[Metric]:
    capacity = pool.capacity_pages
    held = pool.active_pages + pool.pinned_pages + pool.quarantined_pages
    for name, value in (
        ("capacity_pages", capacity),
        ("capacity_blocks", pool.capacity_blocks),
        ("dirty_pages", pool.dirty_pages),
        ("active_ratio", held / capacity),
        ("occupied_ratio", 1 - pool.free_pages / capacity),
        ("mapped_bytes", pool.committed_bytes),
    ):
        yield gauge(f"memd_pool_{name}", [((GPU,), value)])
    if layout is not None:
        limit_bytes = pool.capacity_blocks * layout["block_bytes"]
        yield gauge("memd_pool_limit_bytes", [((GPU,), limit_bytes)])


def _states(pool: PoolSnapshot, layout: Layout | None, shrinking: bool) -> Iterator[Metric]:
    """Gauges with one more label than the device."""
    waste = {"tail": pool.tail_waste_bytes}
    if layout is not None:
        full_blocks = pool.committed_blocks - pool.packed_blocks
        waste["block"] = full_blocks * layout["block_waste_bytes"]
        waste["block"] += pool.packed_blocks * layout["packed_block_waste_bytes"]
    for name, values in (
        (
            "pages",
            {
                "active": pool.active_pages,
                "cached": pool.cached_pages,
                "pinned": pool.pinned_pages,
                "quarantined": pool.quarantined_pages,
                "free": pool.free_pages,
            },
        ),
        (
            "blocks",
            {
                "committed": pool.committed_blocks,
                "uncommitted": pool.capacity_blocks - pool.committed_blocks,
            },
        ),
        (
            "tokens",
            {
                "active": pool.active_tokens,
                "cached": pool.cached_tokens,
                "pinned": pool.pinned_tokens,
            },
        ),
        ("watermark_ratio", {"low": pool.watermark_low, "high": pool.watermark_high}),
        (
            "state",
            {
                "normal": not (pool.reclaiming or shrinking),
                "evicting": pool.reclaiming,
                "shrinking": shrinking and not pool.reclaiming,
            },
        ),
        ("waste_bytes", waste),
    ):
        yield gauge(f"memd_pool_{name}", [((GPU, key), value) for key, value in values.items()])


def _pressure(pool: PoolSnapshot | None) -> Iterator[Metric]:
    crossings = pool.watermark_crossings if pool else {}
    yield counter(
        "memd_pool_watermark_crossings",
        [
            ((GPU, level, direction), crossings.get(f"{level}.{direction}", 0))
            for level in LEVEL
            for direction in ("up", "down")
        ],
    )
    for name, field in (
        ("memd_pool_above_watermark_seconds", "above_watermark_seconds"),
        ("memd_pool_allocations", "allocations"),
    ):
        values = getattr(pool, field) if pool else None
        yield counter(name, by_label(name, values, (GPU,)))
    seconds = pool.allocation_seconds if pool else None
    yield histogram("memd_pool_allocation_seconds", [((GPU,), seconds)])


def _pins(pool: PoolSnapshot | None) -> Iterator[Metric]:
    if pool is not None:
        yield gauge("memd_pin_limit_pages", [((GPU,), pool.pin_limit_pages)])
        yield gauge("memd_pin_promised_pages", [((GPU,), pool.promised_pages)])
    yield counter("memd_pins", by_label("memd_pins", pool.pins if pool else None, (GPU,)))


def _audits(pool: PoolSnapshot | None) -> Iterator[Metric]:
    runs = pool.audit_runs if pool else {}
    yield counter("memd_leak_audit_runs", by_label("memd_leak_audit_runs", runs))
    if pool is not None and any(runs.values()):
        yield gauge("memd_leaked_pages", [((GPU,), pool.leaked_pages)])
    yield _counter("memd_leak_repaired_pages", pool, "leak_repaired_pages")


def _counter(name: str, pool: PoolSnapshot | None, field: str) -> Metric:
    return counter(name, [((GPU,), getattr(pool, field) if pool else 0)])


def _eviction(pool: PoolSnapshot | None) -> Iterator[Metric]:
    yield _counter("memd_eviction_passes", pool, "eviction_passes")
    yield _counter("memd_direct_reclaimed_pages", pool, "direct_reclaimed_pages")
    evicted = pool.evicted_pages if pool else {}
    offloaded = pool.offloaded_pages if pool else {}
    yield counter(
        "memd_evicted_pages",
        [
            ((GPU, reason, action), count)
            for reason in FAMILIES["memd_evicted_pages"].labels["reason"]
            for action, count in (
                ("dropped", evicted.get(reason, 0) - offloaded.get(reason, 0)),
                ("offloaded", offloaded.get(reason, 0)),
            )
        ],
    )
    dropped = by_label("memd_dropped_pages", pool.dropped_pages if pool else {}, (GPU,))
    yield counter("memd_dropped_pages", dropped)
    regretted = {"device": pool.regretted_pages if pool else 0}
    yield counter("memd_regretted_pages", by_label("memd_regretted_pages", regretted))
    for field, label in (
        ("eviction_pass_seconds", GPU),
        ("page_lifetime_seconds", GPU),
        ("page_idle_before_eviction_seconds", GPU),
        ("page_evict_to_reuse_seconds", "device"),
    ):
        yield histogram(f"memd_{field}", [((label,), getattr(pool, field) if pool else None)])


def _prefix(model: str, pool: PoolSnapshot | None) -> Iterator[Metric]:
    queries = pool.prefix_query_tokens if pool else 0
    yield counter("memd_prefix_query_tokens", [((model,), queries)])
    for name, field in (
        ("memd_prefix_hit_tokens", "prefix_hit_tokens"),
        ("memd_prefix_miss_tokens", "prefix_miss_tokens"),
    ):
        values = getattr(pool, field) if pool else None
        yield counter(name, by_label(name, values, (model,)))
    yield _counter("memd_prefix_copies", pool, "prefix_copies")


def _prefix_gauges(model: str, pool: PoolSnapshot) -> Iterator[Metric]:
    yield gauge("memd_prefix_shared_pages", [((GPU,), pool.shared_pages)])
    yield gauge("memd_prefix_deduplicated_bytes", [((GPU,), pool.deduplicated_bytes)])
    yield gauge("memd_prefix_nodes", [((model,), pool.prefix_nodes)])
