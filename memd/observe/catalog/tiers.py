"""Declarations: what the tiers hold, and what moves between them."""

from typing import get_args

from memd.histogram import TRANSFER
from memd.observe.catalog.common import GPU, NO_REPORT
from memd.observe.family import Family
from memd.types import TransferPath

PATHS = get_args(TransferPath)
HELD = ("device", "host")

TIERS = (
    Family(
        "memd_tier_capacity_bytes",
        "gauge",
        "Bytes of pages that a tier may hold",
        {"tier": HELD},
        absent=NO_REPORT,
    ),
    Family(
        "memd_tier_used_bytes",
        "gauge",
        "Bytes of pages in use in a tier",
        {"tier": HELD},
        absent=NO_REPORT,
    ),
    Family(
        "memd_tier_pinned_pages",
        "gauge",
        "Pages of a lower tier that a copy under way reads or writes",
        {"tier": ("host",)},
        absent=NO_REPORT,
    ),
    Family(
        "memd_tier_evicted_pages", "counter", "Pages that a lower tier gave up", {"tier": ("host",)}
    ),
    Family("memd_transfers", "counter", "Pages copied", {**GPU, "path": PATHS}),
    Family(
        "memd_transfer_failures", "counter", "Copies of pages that failed", {**GPU, "path": PATHS}
    ),
    Family("memd_transfer_bytes", "counter", "Bytes copied", {**GPU, "path": PATHS}),
    Family(
        "memd_transfer_seconds",
        "histogram",
        "From the order to copy a page to the report of its end",
        {"path": PATHS},
        TRANSFER,
    ),
    Family(
        "memd_transfer_queue_pages",
        "gauge",
        "Pages ordered to be copied and not reported yet",
        {"path": PATHS},
        absent=NO_REPORT,
    ),
    Family("memd_late_transfer_reports", "counter", "Reports of copies that nobody waited for"),
    Family(
        "memd_prefetched_pages",
        "counter",
        "Pages brought up from the host, by what became of them",
        {"outcome": ("used", "late", "wasted", "cancelled")},
    ),
)
