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
    yield from _transfers(pool)
    yield counter("memd_late_transfer_reports", [((), pool.late_transfers if pool else 0)])
    prefetched = pool.prefetched_pages if pool else None
    yield counter("memd_prefetched_pages", by_label("memd_prefetched_pages", prefetched))


def _gauges(pool: PoolSnapshot, layout: Layout | None) -> Iterator[Metric]:
    if layout is not None:
        page_bytes, packed_bytes = layout["page_bytes"], layout["packed_page_bytes"]
        used_pages = pool.capacity_pages - pool.free_pages
        more_places = layout["packed_pages_per_block"] - layout["pages_per_block"]
        limit_pages = pool.capacity_pages - pool.packed_blocks * more_places
        capacity_bytes = {
            "device": limit_pages * page_bytes,
            "host": pool.host_capacity_pages * page_bytes,
        }
        used_bytes = {
            "device": used_pages * page_bytes - pool.packed_pages * (page_bytes - packed_bytes),
            "host": pool.host_used_pages * page_bytes,
        }
        disk_bytes = {"capacity": pool.disk_limit_bytes, "used": pool.disk_used_bytes}
        for name, values in (("capacity", capacity_bytes), ("used", used_bytes)):
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


def _transfers(pool: PoolSnapshot | None) -> Iterator[Metric]:
    done = {path: pool.transfers[path]["ok"] if pool else 0 for path in PATHS}
    failed = {path: pool.transfers[path]["failed"] if pool else 0 for path in PATHS}
    copied_bytes = {path: pool.transferred_bytes.get(path, 0) if pool else 0 for path in PATHS}
    for name, values in (
        ("memd_transfers", done),
        ("memd_transfer_failures", failed),
        ("memd_transfer_bytes", copied_bytes),
    ):
        yield counter(name, by_label(name, values, (GPU,)))
    seconds = pool.transfer_seconds if pool else {}
    yield histogram("memd_transfer_seconds", [((path,), seconds.get(path)) for path in PATHS])
