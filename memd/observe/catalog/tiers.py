"""Declarations: what the tiers hold, and what moves between them."""

from typing import get_args

from memd.histogram import TRANSFER
from memd.observe.catalog.common import GPU, NO_REPORT
from memd.observe.family import Family
from memd.types import BadFile, DiskFault, FilePath, Tier, TransferPath

PATHS = get_args(TransferPath) + get_args(FilePath)
HELD = get_args(Tier)
DROPPED = (*get_args(DiskFault), "limit", "busy")
REJECTED = get_args(BadFile)

TIERS = (
    Family(
        "memd_tier_capacity_bytes",
        "gauge",
        "Bytes that a tier may hold",
        {"tier": HELD},
        absent=f"{NO_REPORT}; disk: there is none",
    ),
    Family(
        "memd_tier_used_bytes",
        "gauge",
        "Bytes in use in a tier; on disk with headers, folders and rounding",
        {"tier": HELD},
        absent=f"{NO_REPORT}; disk: there is none, or it is not known yet what it holds",
    ),
    Family(
        "memd_tier_pinned_pages",
        "gauge",
        "Pages of a lower tier that a copy under way reads or writes",
        {"tier": ("host",)},
        absent=NO_REPORT,
    ),
    Family(
        "memd_tier_evicted_pages",
        "counter",
        "Pages that a lower tier gave up for others",
        {"tier": HELD[1:]},
    ),
    Family(
        "memd_disk_pages",
        "gauge",
        "Pages that have a file on disk",
        absent=f"{NO_REPORT}, or there is no disk tier",
    ),
    Family(
        "memd_disk_wanted_pages",
        "gauge",
        "Pages that are to be written to disk and wait for a host slot",
        absent=f"{NO_REPORT}, or there is no disk tier",
    ),
    Family(
        "memd_disk_dropped_pages",
        "counter",
        "Pages that were to be written to disk and were not: `full`, `denied`, `gone` and `failed` "
        "are the file system's refusals, `limit` has no room for a page, `busy` too many wait",
        {"reason": DROPPED},
    ),
    Family(
        "memd_disk_rejected_files",
        "counter",
        "Page files that were of no use and are removed",
        {"reason": REJECTED},
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
        "Pages brought up from lower tiers, by what became of them",
        {"outcome": ("used", "late", "wasted", "cancelled")},
    ),
)
