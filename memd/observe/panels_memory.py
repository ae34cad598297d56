"""Rows of the Grafana dashboard about memory."""

from memd.observe.expressions import quantile, rate, ratio, series, total
from memd.observe.panel import Row, area, chart, heat, quantiles, share

POOL = Row(
    "Pool",
    3,
    (
        area(
            "Pages by state",
            "short",
            "The upper edge is the capacity. A pool full of cached pages is healthy",
            (total("memd_pool_pages", by="state"), "{{state}}"),
        ),
        share(
            "Occupied, in use, and the watermarks",
            "Reclaim compares the occupied line with the marks",
            (series("memd_pool_occupied_ratio"), "occupied"),
            (series("memd_pool_active_ratio"), "not evictable"),
            (series("memd_pool_watermark_ratio"), "{{level}} mark"),
        ),
        share(
            "Time above the high mark",
            "100 %: all the time",
            (rate("memd_pool_above_watermark_seconds_total", level="high"), "above high"),
        ),
        area(
            "Pages allocated",
            "ops",
            "Failed attempts make requests wait or give way",
            (rate("memd_pool_allocations_total", by="outcome"), "{{outcome}}"),
        ),
        chart(
            "Allocation time",
            "s",
            "To obtain the pages of one step",
            *quantiles("memd_pool_allocation_seconds"),
        ),
        chart(
            "Memory taken from the device",
            "bytes",
            "",
            (series("memd_pool_mapped_bytes"), "taken"),
            (series("memd_pool_limit_bytes"), "limit"),
        ),
        chart(
            "Waste",
            "bytes",
            "Empty ends of pages in use, and of blocks",
            (total("memd_pool_waste_bytes", by="kind"), "{{kind}}"),
        ),
        area(
            "Tokens stored",
            "short",
            "",
            (total("memd_pool_tokens", by="state"), "{{state}}"),
        ),
        chart(
            "Pins",
            "short",
            "Pages under pins, and the most there may be",
            (series("memd_pin_promised_pages"), "promised"),
            (series("memd_pin_limit_pages"), "limit"),
        ),
    ),
)

ELASTIC = Row(
    "Elastic pool",
    3,
    (
        share(
            "Fragmentation",
            "Blocks in use that moving pages together would empty",
            (series("memd_pool_fragmentation_ratio"), "fragmentation"),
            (series("memd_pool_max_fragmentation_ratio"), "limit"),
        ),
        chart(
            "Limit, and what the device has free",
            "bytes",
            "The target is below the limit while others on the device need memory",
            (series("memd_pool_target_bytes"), "target"),
            (series("memd_pool_mapped_bytes"), "taken"),
            (series("memd_device_free_bytes"), "free"),
        ),
        area(
            "Blocks taken",
            "ops",
            "",
            (rate("memd_pool_grown_blocks_total", by="reason"), "{{reason}}"),
        ),
        area(
            "Blocks given back",
            "ops",
            "",
            (rate("memd_pool_shrunk_blocks_total", by="reason"), "{{reason}}"),
        ),
        chart(
            "Pages moved",
            "Bps",
            "By defragmentation",
            (rate("memd_defrag_moved_bytes_total"), "moved"),
        ),
        chart(
            "Time of a step's moves",
            "s",
            "What defragmentation takes of a step",
            *quantiles("memd_defrag_step_seconds"),
        ),
    ),
)

PACKING = Row(
    "Packed pages",
    3,
    (
        chart(
            "Packed pages and blocks",
            "short",
            "Where kv.format is full there are none",
            (series("memd_pool_packed_pages"), "pages"),
            (series("memd_pool_packed_blocks"), "blocks"),
        ),
        area(
            "Pages due to be packed",
            "ops",
            "No room: they are tried again when others are due",
            (rate("memd_packing_pages_total", by="outcome"), "{{outcome}}"),
        ),
        chart(
            "Memory saved by packing",
            "bytes",
            "By which packed pages are smaller than full ones",
            (series("memd_packing_saved_bytes"), "saved"),
        ),
        share(
            "What packing loses",
            "Relative error of keys and values since the start; packing stops when a head's mean "
            "over several packings passes the limit",
            (series("memd_packing_error_ratio"), "{{kind}}"),
        ),
    ),
)

EVICTION = Row(
    "Eviction and tiers",
    3,
    (
        area(
            "Pages evicted",
            "ops",
            "Allocation: requests waited for it. Watermark and ahead: in the background",
            (rate("memd_evicted_pages_total", by="reason, action"), "{{reason}}, {{action}}"),
            (rate("memd_dropped_pages_total", by="policy"), "let go in use, {{policy}}"),
        ),
        share(
            "Regret",
            "Evicted pages that were asked for again soon, of all evicted ones",
            (
                ratio(rate("memd_regretted_pages_total"), rate("memd_evicted_pages_total")),
                "regretted",
            ),
        ),
        heat(
            "Idle time before eviction",
            "Short times mean a pool that is too small",
            "memd_page_idle_before_eviction_seconds",
        ),
        share(
            "Tier use",
            "",
            (
                f"{series('memd_tier_used_bytes')} / {series('memd_tier_capacity_bytes')}",
                "{{tier}}",
            ),
        ),
        chart(
            "Copies between tiers",
            "Bps",
            "d2h: from the device to the host; h2d: back",
            (rate("memd_transfer_bytes_total", by="path"), "{{path}}"),
        ),
        chart(
            "Copies waiting, and failed",
            "short",
            "",
            (total("memd_transfer_queue_pages", by="path"), "waiting {{path}}"),
            (rate("memd_transfer_failures_total", by="path"), "failed a second {{path}}"),
        ),
        chart(
            "Time of a copy, p95",
            "s",
            "From the order to its end",
            (quantile(0.95, "memd_transfer_seconds", by="path"), "{{path}}"),
        ),
        area(
            "Prefetched pages",
            "ops",
            "By what became of them",
            (rate("memd_prefetched_pages_total", by="outcome"), "{{outcome}}"),
        ),
    ),
)

SHARING = Row(
    "Prefix sharing",
    3,
    (
        area(
            "Hits by tier",
            "ops",
            "Prompt tokens a second",
            (rate("memd_prefix_hit_tokens_total", by="tier"), "{{tier}}"),
        ),
        area(
            "Misses by reason",
            "ops",
            "Prompt tokens a second; the final one is always computed",
            (rate("memd_prefix_miss_tokens_total", by="reason"), "{{reason}}"),
        ),
        chart(
            "Memory saved by sharing",
            "bytes",
            "Bytes not stored twice",
            (total("memd_prefix_deduplicated_bytes"), "saved"),
        ),
    ),
)
