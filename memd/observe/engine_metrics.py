"""The engine's metrics, from its latest snapshot.

Before the first snapshot counters and histograms are at zero and gauges are absent.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, get_args

from prometheus_client.core import Metric

from memd.engine.messages import EngineSnapshot, Histogram, PoolSnapshot, Ready
from memd.histogram import LATENCY, MICRO, RESIDENCE, STEP
from memd.observe.families import by_label, counter, gauge, histogram
from memd.observe.tier_metrics import tier_counters, tier_gauges
from memd.types import FinishReason, Tier

GPU = "0"  # the one device of this daemon's engine
TIERS = get_args(Tier)
MODES = ("prefill", "decode", "mixed")


class EngineSource(Protocol):
    """Where the snapshot comes from: `memd.api.engine_client.EngineClient`."""

    ready: Ready | None
    snapshot: EngineSnapshot | None
    snapshot_at: float  # Unix time

    @property
    def restarts(self) -> Mapping[str, int]:
        """Of the engine, by reason; every reason is there."""

    @property
    def state(self) -> str:
        """loading, ready, restarting, draining or failed."""


def engine_metrics(model: str, source: EngineSource) -> Iterator[Metric]:
    """All families of the engine and its pool."""
    snapshot = source.snapshot
    pool = snapshot.pool if snapshot else None
    if source.ready is not None:
        yield from _layout(source.ready, pool)
        yield gauge(
            "memd_kernel_launch_table",
            "1 for where kernels' launch parameters come from; none: the CPU has no such kernels",
            ("source",),
            [
                ((name,), name == (source.ready.launch_table or "none"))
                for name in ("user", "shipped", "default", "none")
            ],
        )
    if pool is not None:
        yield from _pool_gauges(pool)
        yield from _pool_partitions(pool)
    yield from _pool_counters(pool)
    yield from _eviction(pool)
    page_bytes = source.ready.pool["page_bytes"] if source.ready else 0
    yield from tier_counters(pool, page_bytes, GPU)
    yield from _prefix(model, pool)
    if snapshot is not None:
        yield from _engine_gauges(model, snapshot, source.snapshot_at)
    yield from _engine_counters(model, snapshot)


def _empty(buckets: Sequence[float]) -> Histogram:
    return Histogram(list(buckets), [0] * (len(buckets) + 1), 0.0)


def _layout(ready: Ready, pool: PoolSnapshot | None) -> Iterator[Metric]:
    layout = ready.pool
    for name, key, text in (
        ("memd_pool_block_size_bytes", "block_bytes", "Size of one block"),
        ("memd_pool_page_size_bytes", "page_bytes", "Size of one page"),
        ("memd_pool_page_tokens", "page_tokens", "Tokens a page holds"),
    ):
        yield gauge(name, text, (), [((), layout[key])] if key in layout else [])
    if pool is None or "page_bytes" not in layout:
        return
    page_bytes, block_bytes = layout["page_bytes"], layout["block_bytes"]
    yield gauge(
        "memd_pool_limit_bytes",
        "Ceiling of the memory that the pool takes from the device",
        ("gpu",),
        [((GPU,), pool.capacity_blocks * block_bytes)],
    )
    yield from tier_gauges(pool, page_bytes)


def _pool_gauges(pool: PoolSnapshot) -> Iterator[Metric]:
    capacity = pool.capacity_pages
    held = pool.active_pages + pool.quarantined_pages
    for name, text, value in (
        ("capacity_pages", "Pages the pool may hold", capacity),
        ("capacity_blocks", "Blocks the pool may hold", pool.capacity_blocks),
        ("dirty_pages", "Pages with no copy in a lower tier", pool.dirty_pages),
        ("active_ratio", "Share of pages that eviction cannot take", held / capacity),
        (
            "occupied_ratio",
            "Share of pages not free; the watermarks compare with it",
            1 - pool.free_pages / capacity,
        ),
        ("mapped_bytes", "Bytes held from the device", pool.committed_bytes),
    ):
        yield gauge(f"memd_pool_{name}", text, ("gpu",), [((GPU,), value)])


def _pool_partitions(pool: PoolSnapshot) -> Iterator[Metric]:
    """Gauges with one more label than the device."""
    for name, label, text, values in (
        (
            "pages",
            "state",
            "Pages by exclusive state; they sum to the capacity",
            {
                "active": pool.active_pages,
                "cached": pool.cached_pages,
                "quarantined": pool.quarantined_pages,
                "free": pool.free_pages,
            },
        ),
        (
            "blocks",
            "state",
            "Blocks with and without memory behind them",
            {
                "committed": pool.committed_blocks,
                "uncommitted": pool.capacity_blocks - pool.committed_blocks,
            },
        ),
        (
            "tokens",
            "state",
            "Tokens stored",
            {"active": pool.active_tokens, "cached": pool.cached_tokens},
        ),
        (
            "watermark_ratio",
            "level",
            "Watermarks in force",
            {"low": pool.watermark_low, "high": pool.watermark_high},
        ),
        (
            "state",
            "state",
            "1 for what background reclaim does now",
            {"normal": not pool.reclaiming, "evicting": pool.reclaiming},
        ),
        (
            "waste_bytes",
            "kind",
            "Bytes of pages that hold no token",
            {"tail": pool.tail_waste_bytes},
        ),
    ):
        samples = by_label(tuple(values), values, (GPU,))
        yield gauge(f"memd_pool_{name}", text, ("gpu", label), samples)


def _pool_counters(pool: PoolSnapshot | None) -> Iterator[Metric]:
    crossings = pool.watermark_crossings if pool else {}
    yield counter(
        "memd_pool_watermark_crossings",
        "Crossings of a watermark",
        ("gpu", "level", "direction"),
        [
            ((GPU, level, direction), crossings.get(f"{level}.{direction}", 0))
            for level in ("low", "high")
            for direction in ("up", "down")
        ],
    )
    yield counter(
        "memd_pool_above_watermark_seconds",
        "Time spent above a watermark",
        ("gpu", "level"),
        by_label(("low", "high"), pool.above_watermark_seconds if pool else None, (GPU,)),
    )
    yield counter(
        "memd_pool_allocations",
        "Pages allocated, from free ones or by evicting, and attempts that failed",
        ("gpu", "outcome"),
        by_label(("free", "evicted", "failed"), pool.allocations if pool else None, (GPU,)),
    )
    yield histogram(
        "memd_pool_allocation_seconds",
        "Time to obtain the pages of one step",
        ("gpu",),
        [((GPU,), pool.allocation_seconds if pool else _empty(MICRO))],
    )
    runs = pool.audit_runs if pool else {}
    yield counter(
        "memd_leak_audit_runs",
        "Audits of the pool",
        ("outcome",),
        by_label(("clean", "leak"), runs),
    )
    yield gauge(
        "memd_leaked_pages",
        "Pages held by nobody, found by the last audit",
        ("gpu",),
        [((GPU,), pool.leaked_pages)] if pool and any(runs.values()) else [],
    )
    yield _counter(
        "memd_leak_repaired_pages", "Pages an audit took back", pool, "leak_repaired_pages"
    )


def _counter(name: str, text: str, pool: PoolSnapshot | None, field: str) -> Metric:
    return counter(name, text, ("gpu",), [((GPU,), getattr(pool, field) if pool else 0)])


def _eviction(pool: PoolSnapshot | None) -> Iterator[Metric]:
    yield _counter("memd_eviction_passes", "Passes of eviction", pool, "eviction_passes")
    yield _counter(
        "memd_direct_reclaimed_pages",
        "Pages evicted because an allocation found none free",
        pool,
        "direct_reclaimed_pages",
    )
    regretted = {"device": pool.regretted_pages if pool else 0}
    yield counter(
        "memd_regretted_pages",
        "Evicted pages asked for again within the regret window",
        ("tier",),
        by_label(TIERS, regretted),
    )
    for name, text, label, buckets, field in (
        ("eviction_pass_seconds", "Length of one pass of eviction", "gpu", MICRO, None),
        ("page_lifetime_seconds", "From allocation to eviction", "gpu", RESIDENCE, None),
        (
            "page_idle_before_eviction_seconds",
            "From the last use to eviction",
            "gpu",
            RESIDENCE,
            None,
        ),
        (
            "page_evict_to_reuse_seconds",
            "From eviction to the next request for the same content",
            "tier",
            RESIDENCE,
            "device",
        ),
    ):
        counted = getattr(pool, name) if pool else _empty(buckets)
        yield histogram(f"memd_{name}", text, (label,), [((field or GPU,), counted)])


def _prefix(model: str, pool: PoolSnapshot | None) -> Iterator[Metric]:
    yield counter(
        "memd_prefix_query_tokens",
        "Prompt tokens looked up, once for each request",
        ("model",),
        [((model,), pool.prefix_query_tokens if pool else 0)],
    )
    yield counter(
        "memd_prefix_hit_tokens",
        "Prompt tokens found, by the tier that held them",
        ("model", "tier"),
        by_label(TIERS, pool.prefix_hit_tokens if pool else None, (model,)),
    )
    yield counter(
        "memd_prefix_miss_tokens",
        "Prompt tokens not found; `final` is the last one, which is always computed",
        ("model", "reason"),
        by_label(("cold", "evicted", "final"), pool.prefix_miss_tokens if pool else None, (model,)),
    )
    yield _counter("memd_prefix_copies", "Copies of partly shared pages", pool, "prefix_copies")
    if pool is None:
        return
    for name, text, label, value in (
        ("shared_pages", "Pages held by two sequences or more", ("gpu", GPU), pool.shared_pages),
        ("deduplicated_bytes", "Bytes not stored twice", ("gpu", GPU), pool.deduplicated_bytes),
        ("nodes", "Nodes of the prefix tree", ("model", model), pool.prefix_nodes),
    ):
        yield gauge(f"memd_prefix_{name}", text, (label[0],), [((label[1],), value)])


def _engine_gauges(model: str, snapshot: EngineSnapshot, snapshot_at: float) -> Iterator[Metric]:
    yield gauge(
        "memd_requests_running",
        "Sequences in the batch",
        ("model",),
        [((model,), snapshot.running)],
    )
    yield gauge(
        "memd_requests_waiting",
        "Sequences that wait to start",
        ("model", "reason"),
        by_label(("capacity", "prefix", "transfer"), snapshot.waiting, (model,)),
    )
    age = snapshot.last_step_age_seconds
    yield gauge(
        "memd_engine_last_step_timestamp_seconds",
        "When the last step ended",
        ("model",),
        [] if age is None else [((model,), snapshot_at - age)],
    )


def _engine_counters(model: str, snapshot: EngineSnapshot | None) -> Iterator[Metric]:
    for name, text, label, fixed, field in (
        ("engine_steps", "Steps of the engine", "mode", MODES, "steps"),
        (
            "finished_sequences",
            "Sequences ended",
            "reason",
            get_args(FinishReason),
            "finished",
        ),
        (
            "prompt_tokens",
            "Prompt tokens, by where their KV came from",
            "source",
            ("computed", *TIERS),
            "prompt_tokens",
        ),
    ):
        values = getattr(snapshot, field) if snapshot else None
        yield counter(f"memd_{name}", text, ("model", label), by_label(fixed, values, (model,)))
    yield counter(
        "memd_preemptions",
        "Sequences preempted",
        ("model", "mode"),
        [((model, "recompute"), snapshot.preemptions if snapshot else 0)],
    )
    for name, text, field in (
        ("recomputed_tokens", "Tokens computed again, as their KV was lost", "recomputed_tokens"),
        ("generated_tokens", "Tokens generated", "generated_tokens"),
        ("nan_logits", "Sequences ended by logits that are no numbers", "nan_logits"),
        (
            "engine_wait_seconds",
            "Time in which the engine's host side waited for the device",
            "wait_seconds",
        ),
    ):
        value = getattr(snapshot, field) if snapshot else 0
        yield counter(f"memd_{name}", text, ("model",), [((model,), value)])
    steps = snapshot.step_seconds if snapshot else {}
    yield histogram(
        "memd_engine_step_seconds",
        "Wall time of one step",
        ("model", "mode"),
        [((model, mode), steps.get(mode) or _empty(STEP)) for mode in MODES],
    )
    yield histogram(
        "memd_queue_duration_seconds",
        "Waiting before the first step",
        ("model",),
        [((model,), snapshot.queue_seconds if snapshot else _empty(LATENCY))],
    )
    yield histogram(
        "memd_kv_stall_seconds",
        "Time a started sequence waited for memory",
        ("model", "cause"),
        [((model, "preempted"), snapshot.stall_seconds if snapshot else _empty(LATENCY))],
    )
