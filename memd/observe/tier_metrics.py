"""Metrics of the tiers: what each holds, and what moves between them."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from memd.engine.snapshot_types import PoolSnapshot
from memd.observe.catalog.tiers import PATHS
from memd.observe.families import by_label, counter, gauge, histogram
from memd.observe.pool_metrics import GPU, Layout


def tier_metrics(pool: PoolSnapshot | None, layout: Layout | None) -> Iterator[Metric]:
    """All families of the tiers; see `pool_metrics`."""
    if pool is not None:
        yield from _gauges(pool, layout)
    evicted = (pool.host_evicted_pages, pool.disk_evicted_pages) if pool else (0, 0)
    yield counter("memd_tier_evicted_pages", [(("host",), evicted[0]), (("disk",), evicted[1])])
    dropped = pool.disk_dropped_pages if pool else None
    yield counter("memd_disk_dropped_pages", by_label("memd_disk_dropped_pages", dropped))
    rejected = pool.disk_rejected_files if pool else None
    yield counter("memd_disk_rejected_files", by_label("memd_disk_rejected_files", rejected))
    yield from _transfers(pool, layout)
    yield counter("memd_late_transfer_reports", [((), pool.late_transfers if pool else 0)])
    prefetched = pool.prefetched_pages if pool else None
    yield counter("memd_prefetched_pages", by_label("memd_prefetched_pages", prefetched))


def _gauges(pool: PoolSnapshot, layout: Layout | None) -> Iterator[Metric]:
    if layout is not None:
        used_pages = {
            "device": pool.capacity_pages - pool.free_pages,
            "host": pool.host_used_pages,
        }
        capacity_pages = {"device": pool.capacity_pages, "host": pool.host_capacity_pages}
        disk_bytes = {"capacity": pool.disk_limit_bytes, "used": pool.disk_used_bytes}
        for name, pages in (("capacity", capacity_pages), ("used", used_pages)):
            values = {tier: count * layout["page_bytes"] for tier, count in pages.items()}
            disk = disk_bytes[name]
            if disk is not None:
                values["disk"] = disk
            yield gauge(f"memd_tier_{name}_bytes", [((tier,), n) for tier, n in values.items()])
    if pool.disk_limit_bytes is not None:
        yield gauge("memd_disk_pages", [((), pool.disk_pages)])
        yield gauge("memd_disk_wanted_pages", [((), pool.disk_wanted_pages)])
    yield gauge(
        "memd_transfer_queue_pages",
        by_label("memd_transfer_queue_pages", pool.transfers_under_way),
    )
    yield gauge("memd_tier_pinned_pages", [(("host",), pool.host_pinned_pages)])


def _transfers(pool: PoolSnapshot | None, layout: Layout | None) -> Iterator[Metric]:
    done = {path: pool.transfers[path]["ok"] if pool else 0 for path in PATHS}
    failed = {path: pool.transfers[path]["failed"] if pool else 0 for path in PATHS}
    page_bytes = layout["page_bytes"] if layout else 0
    copied_bytes = {path: count * page_bytes for path, count in done.items()}
    for name, values in (
        ("memd_transfers", done),
        ("memd_transfer_failures", failed),
        ("memd_transfer_bytes", copied_bytes),
    ):
        yield counter(name, by_label(name, values, (GPU,)))
    seconds = pool.transfer_seconds if pool else {}
    yield histogram("memd_transfer_seconds", [((path,), seconds.get(path)) for path in PATHS])
