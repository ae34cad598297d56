"""Declarations: the pool, its marks, eviction, sharing."""

from typing import get_args

from memd.histogram import MICRO, RESIDENCE
from memd.observe.catalog.common import GPU, MODEL, NO_REPORT
from memd.observe.family import Family
from memd.types import (
    DefragReason,
    DropPolicy,
    EvictionReason,
    GrowReason,
    PinOutcome,
    ShrinkReason,
    Tier,
)

LEVEL = ("low", "high")
TIERS = get_args(Tier)

LAYOUT = (
    Family("memd_pool_block_size_bytes", "gauge", "Size of one block", absent=NO_REPORT),
    Family("memd_pool_page_size_bytes", "gauge", "Size of one page", absent=NO_REPORT),
    Family("memd_pool_page_tokens", "gauge", "Tokens a page holds", absent=NO_REPORT),
    Family(
        "memd_pool_limit_bytes",
        "gauge",
        "Ceiling of the memory that the pool takes from the device",
        GPU,
        absent=NO_REPORT,
    ),
    Family("memd_pool_mapped_bytes", "gauge", "Bytes held from the device", GPU, absent=NO_REPORT),
    Family("memd_pool_capacity_pages", "gauge", "Pages the pool may hold", GPU, absent=NO_REPORT),
    Family("memd_pool_capacity_blocks", "gauge", "Blocks the pool may hold", GPU, absent=NO_REPORT),
)

STATE = (
    Family(
        "memd_pool_pages",
        "gauge",
        "Pages by exclusive state; they sum to the capacity",
        {**GPU, "state": ("active", "cached", "pinned", "quarantined", "free")},
        absent=NO_REPORT,
    ),
    Family(
        "memd_pool_blocks",
        "gauge",
        "Blocks with and without memory behind them",
        {**GPU, "state": ("committed", "uncommitted")},
        absent=NO_REPORT,
    ),
    Family(
        "memd_pool_tokens",
        "gauge",
        "Tokens stored, by the state of their pages",
        {**GPU, "state": ("active", "cached", "pinned")},
        absent=NO_REPORT,
    ),
    Family(
        "memd_pool_dirty_pages",
        "gauge",
        "Pages with no copy on the host; they may have a file on disk",
        GPU,
        absent=NO_REPORT,
    ),
    Family(
        "memd_pool_active_ratio",
        "gauge",
        "Share of pages that eviction cannot take; alerts compare with it",
        GPU,
        absent=NO_REPORT,
    ),
    Family(
        "memd_pool_occupied_ratio",
        "gauge",
        "Share of pages not free; the watermarks compare with it",
        GPU,
        absent=NO_REPORT,
    ),
    Family(
        "memd_pool_watermark_ratio",
        "gauge",
        "Watermarks in force",
        {**GPU, "level": LEVEL},
        absent=NO_REPORT,
    ),
    Family(
        "memd_pool_state",
        "gauge",
        "1 for what goes on now: nothing, background reclaim, coming down to a lower limit",
        {**GPU, "state": ("normal", "evicting", "shrinking")},
        absent=NO_REPORT,
    ),
    Family(
        "memd_pool_waste_bytes",
        "gauge",
        "Bytes that hold no token: of pages in use behind the last token (tail), and of committed "
        "blocks behind the last page (block)",
        {**GPU, "kind": ("tail", "block")},
        absent=NO_REPORT,
    ),
)

PRESSURE = (
    Family(
        "memd_pool_watermark_crossings",
        "counter",
        "Crossings of a watermark",
        {**GPU, "level": LEVEL, "direction": ("up", "down")},
    ),
    Family(
        "memd_pool_above_watermark_seconds",
        "counter",
        "Time spent above a watermark; its rate is the share of time",
        {**GPU, "level": LEVEL},
    ),
    Family(
        "memd_pool_allocations",
        "counter",
        "Pages allocated, from free ones or by evicting, and attempts that failed",
        {**GPU, "outcome": ("free", "evicted", "failed")},
    ),
    Family(
        "memd_pool_allocation_seconds",
        "histogram",
        "Time to obtain the pages of one step",
        GPU,
        MICRO,
    ),
)

ELASTIC = (
    Family(
        "memd_pool_fragmentation_ratio",
        "gauge",
        "Share of the blocks that hold something which moving pages together would empty",
        GPU,
        absent=NO_REPORT,
    ),
    Family(
        "memd_pool_max_fragmentation_ratio",
        "gauge",
        "Fragmentation that runs of defragmentation keep the pool below",
        GPU,
        absent=NO_REPORT,
    ),
    Family(
        "memd_pool_empty_blocks",
        "gauge",
        "Blocks with memory that hold nothing; they go back to the device when they stay so",
        GPU,
        absent=NO_REPORT,
    ),
    Family(
        "memd_pool_target_bytes",
        "gauge",
        "The limit, or less while others on the device need memory",
        GPU,
        absent=NO_REPORT,
    ),
    Family(
        "memd_pool_under_pressure",
        "gauge",
        "1 while others on the device need memory and the pool gives some up",
        GPU,
        absent=NO_REPORT,
    ),
    Family(
        "memd_device_free_bytes",
        "gauge",
        "Memory free on the device, as the pool sees it",
        GPU,
        absent="until the engine has looked, and where the pool cannot give memory back",
    ),
    Family(
        "memd_pool_grown_blocks",
        "counter",
        "Blocks taken from the device, for pages at once or ahead of need",
        {**GPU, "reason": get_args(GrowReason)},
    ),
    Family(
        "memd_pool_shrunk_blocks",
        "counter",
        "Blocks given back to the device",
        {**GPU, "reason": get_args(ShrinkReason)},
    ),
    Family(
        "memd_defrag_runs",
        "counter",
        "Runs of defragmentation that moved something, by why they began",
        {**GPU, "reason": get_args(DefragReason), "outcome": ("completed", "failed")},
    ),
    Family("memd_defrag_moved_pages", "counter", "Pages moved by defragmentation", GPU),
    Family("memd_defrag_moved_bytes", "counter", "Bytes moved by defragmentation", GPU),
    Family(
        "memd_defrag_step_seconds",
        "histogram",
        "Time that moving pages took of a step",
        GPU,
        MICRO,
    ),
)

PINS = (
    Family(
        "memd_pin_limit_pages",
        "gauge",
        "Pages that pins may keep from eviction, all together",
        GPU,
        absent=NO_REPORT,
    ),
    Family(
        "memd_pin_promised_pages",
        "gauge",
        "Pages under pins, held by sequences or not",
        GPU,
        absent=NO_REPORT,
    ),
    Family(
        "memd_pins",
        "counter",
        "Pins of prefixes, by what became of them",
        {**GPU, "outcome": get_args(PinOutcome)},
    ),
)

AUDIT = (
    Family("memd_leak_audit_runs", "counter", "Audits of the pool", {"outcome": ("clean", "leak")}),
    Family(
        "memd_leaked_pages",
        "gauge",
        "Pages held by nobody, found by the last audit; 0 when it was clean",
        GPU,
        absent="until the first audit",
    ),
    Family("memd_leak_repaired_pages", "counter", "Pages an audit took back", GPU),
)

_FULL = "where all pages are full"

PACKING = (
    Family(
        "memd_pool_packed_pages",
        "gauge",
        "Pages that hold something and are packed",
        GPU,
        absent=NO_REPORT,
    ),
    Family(
        "memd_pool_packed_blocks",
        "gauge",
        "Blocks that are cut into packed pages",
        GPU,
        absent=NO_REPORT,
    ),
    Family(
        "memd_packing_saved_bytes",
        "gauge",
        "Bytes by which packed pages are smaller than full ones",
        GPU,
        absent=_FULL,
    ),
    Family(
        "memd_packing_pages",
        "counter",
        "Pages that were due: packed, or left full for now because it failed or there was no room",
        {**GPU, "outcome": ("packed", "failed", "no_room")},
    ),
    Family(
        "memd_packing_error_ratio",
        "gauge",
        "Relative error of packed keys and values: mean, worst of a page, layer and head, and the "
        "mean of a head at which packing stops",
        {**GPU, "kind": ("mean", "worst", "limit")},
        absent="where all pages are full, and mean and worst until one is packed",
    ),
    Family(
        "memd_packing_stopped",
        "gauge",
        "1 once packing has lost more than its format may; no more pages are packed then",
        GPU,
        absent=_FULL,
    ),
)

EVICTION = (
    Family("memd_eviction_passes", "counter", "Passes of eviction", GPU),
    Family(
        "memd_evicted_pages",
        "counter",
        "Pages evicted from the device; offloaded ones are still on the host",
        {**GPU, "reason": get_args(EvictionReason), "action": ("dropped", "offloaded")},
    ),
    Family(
        "memd_dropped_pages",
        "counter",
        "Pages that running sequences let go: no later token of theirs sees them",
        {**GPU, "policy": get_args(DropPolicy)},
    ),
    Family(
        "memd_direct_reclaimed_pages",
        "counter",
        "Pages evicted because an allocation found none free",
        GPU,
    ),
    Family("memd_eviction_pass_seconds", "histogram", "Length of one pass of eviction", GPU, MICRO),
    Family(
        "memd_regretted_pages",
        "counter",
        "Evicted pages asked for again within the regret window",
        {"tier": TIERS},
    ),
    Family(
        "memd_page_lifetime_seconds", "histogram", "From allocation to eviction", GPU, RESIDENCE
    ),
    Family(
        "memd_page_idle_before_eviction_seconds",
        "histogram",
        "From the last use to eviction",
        GPU,
        RESIDENCE,
    ),
    Family(
        "memd_page_evict_to_reuse_seconds",
        "histogram",
        "From eviction to the next request for the same content",
        {"tier": ("device",)},
        RESIDENCE,
    ),
)

PREFIX = (
    Family(
        "memd_prefix_query_tokens",
        "counter",
        "Prompt tokens looked up, once for each request",
        MODEL,
    ),
    Family(
        "memd_prefix_hit_tokens",
        "counter",
        "Prompt tokens found, by the tier that held them",
        {**MODEL, "tier": TIERS},
    ),
    Family(
        "memd_prefix_miss_tokens",
        "counter",
        "Prompt tokens not found; `final` is the last one, which is always computed",
        {**MODEL, "reason": ("cold", "evicted", "final")},
    ),
    Family("memd_prefix_copies", "counter", "Copies of partly shared pages", GPU),
    Family(
        "memd_prefix_shared_pages",
        "gauge",
        "Pages held by two sequences or more",
        GPU,
        absent=NO_REPORT,
    ),
    Family(
        "memd_prefix_deduplicated_bytes", "gauge", "Bytes not stored twice", GPU, absent=NO_REPORT
    ),
    Family("memd_prefix_nodes", "gauge", "Nodes of the prefix tree", MODEL, absent=NO_REPORT),
)
