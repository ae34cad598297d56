"""Metrics of the tiers: what each holds, and what moves between them."""

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import Metric

from memd.engine.messages import PoolSnapshot
from memd.observe.families import by_label, counter, gauge
from memd.types import EvictionReason, TransferPath

PATHS = get_args(TransferPath)


def tier_gauges(pool: PoolSnapshot, page_bytes: int) -> Iterator[Metric]:
    """What the tiers hold and what is on its way."""
    used_pages = {
        "device": pool.capacity_pages - pool.free_pages,
        "host": pool.host_used_pages,
    }
    capacity_pages = {"device": pool.capacity_pages, "host": pool.host_capacity_pages}
    for name, text, pages in (
        ("capacity", "Bytes of pages that a tier may hold", capacity_pages),
        ("used", "Bytes of pages in use in a tier", used_pages),
    ):
        yield gauge(
            f"memd_tier_{name}_bytes",
            text,
            ("tier",),
            [((tier,), count * page_bytes) for tier, count in pages.items()],
        )
    yield gauge(
        "memd_transfer_queue_pages",
        "Pages ordered to be copied and not reported yet",
        ("path",),
        by_label(PATHS, pool.transfers_under_way),
    )
    yield gauge(
        "memd_tier_pinned_pages",
        "Host pages that a copy under way reads or writes",
        ("tier",),
        [(("host",), pool.host_pinned_pages)],
    )


def tier_counters(pool: PoolSnapshot | None, page_bytes: int, gpu: str) -> Iterator[Metric]:
    """What has moved, and what became of it."""
    evicted = pool.evicted_pages if pool else {}
    offloaded = pool.offloaded_pages if pool else {}
    yield counter(
        "memd_evicted_pages",
        "Pages evicted from the device; offloaded ones are still on the host",
        ("gpu", "reason", "action"),
        [
            ((gpu, reason, action), count)
            for reason in get_args(EvictionReason)
            for action, count in (
                ("dropped", evicted.get(reason, 0) - offloaded.get(reason, 0)),
                ("offloaded", offloaded.get(reason, 0)),
            )
        ],
    )
    yield counter(
        "memd_tier_evicted_pages",
        "Pages that a lower tier gave up",
        ("tier",),
        [(("host",), pool.host_evicted_pages if pool else 0)],
    )
    done = {path: pool.transfers[path]["ok"] if pool else 0 for path in PATHS}
    failed = {path: pool.transfers[path]["failed"] if pool else 0 for path in PATHS}
    for name, text, values in (
        ("transfers", "Pages copied", done),
        ("transfer_failures", "Copies of pages that failed", failed),
        (
            "transfer_bytes",
            "Bytes copied",
            {path: count * page_bytes for path, count in done.items()},
        ),
    ):
        yield counter(f"memd_{name}", text, ("gpu", "path"), by_label(PATHS, values, (gpu,)))
    yield counter(
        "memd_late_transfer_reports",
        "Reports of copies that nobody waited for",
        (),
        [((), pool.late_transfers if pool else 0)],
    )
    yield counter(
        "memd_prefetched_pages",
        "Pages brought up from the host, by what became of them",
        ("outcome",),
        by_label(("used", "late", "wasted", "cancelled"), pool.prefetched_pages if pool else None),
    )
