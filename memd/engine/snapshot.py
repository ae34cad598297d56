"""The engine's state as one message. Everything is read or derived in O(running sequences)."""

from collections import Counter
from typing import Any

from memd.engine.commands import Commands
from memd.engine.counters import EngineCounters
from memd.engine.elasticity import Elasticity
from memd.engine.packing import Packing
from memd.engine.scheduler import Scheduler
from memd.engine.snapshot_types import EngineSnapshot, Histogram, PoolSnapshot, TenantSnapshot
from memd.histogram import HistogramCounts
from memd.pool.counters import PATHS
from memd.pool.pool import Pool


def take_snapshot(
    pool: Pool,
    scheduler: Scheduler,
    commands: Commands,
    elasticity: Elasticity,
    packing: Packing | None,
    counters: EngineCounters,
    last_step_age_seconds: float | None,
    allocator_bytes: int | None,
) -> EngineSnapshot:
    """Read the engine's state between two steps."""
    waiting = {"capacity": 0, "quota": 0, "prefix": 0, "transfer": 0}
    for request in scheduler.waiting:
        waiting[scheduler.waiting_for.get(request.id, "capacity")] += 1
    return EngineSnapshot(
        revision=commands.revision,
        steps=dict(counters.steps),
        replayed_steps=dict(counters.replayed_steps),
        shared_prefix_steps=counters.shared_prefix_steps,
        step_seconds={mode: _histogram(h) for mode, h in counters.step_seconds.items()},
        last_step_age_seconds=last_step_age_seconds,
        running=len(scheduler.running),
        waiting=waiting,
        finished={str(reason): count for reason, count in counters.finished.items()},
        preemptions=scheduler.counters.preemptions,
        recomputed_tokens=scheduler.counters.recomputed_tokens,
        prompt_tokens={
            "computed": scheduler.counters.prompt_tokens
            - sum(scheduler.counters.cached_tokens.values()),
            **scheduler.counters.cached_tokens,
        },
        generated_tokens=counters.generated_tokens,
        queue_seconds=_histogram(scheduler.counters.queue_seconds),
        stall_seconds={
            cause: _histogram(h) for cause, h in scheduler.counters.stalls.seconds.items()
        },
        nan_logits=counters.nan_logits,
        allocator_bytes=allocator_bytes,
        wait_seconds=counters.wait_seconds,
        settings=commands.settings_in_force(),
        elastic=elasticity.snapshot(),
        packing=None if packing is None else packing.snapshot(),
        pool=_pool_snapshot(
            pool, commands.audit_runs, commands.leaked_pages, commands.leak_repaired_pages
        ),
        tenants=_tenants(pool, scheduler, commands),
    )


def _tenants(pool: Pool, scheduler: Scheduler, commands: Commands) -> dict[str, TenantSnapshot]:
    """Tenants that are configured, or have pages or requests, or had some computed."""
    running = Counter(request.tenant for request in scheduler.running)
    waiting = Counter(request.tenant for request in scheduler.waiting)
    weights = {each["name"]: each["weight"] for each in commands.tenancy.configured}
    tenants = pool.tenants
    names = dict.fromkeys([*weights, *tenants.names, *running, *waiting])
    return {
        name: TenantSnapshot(
            quota_pages=tenants.quotas.get(name),
            weight=weights.get(name, 1.0),
            configured=name in weights,
            used_pages=tenants.used(name),
            pinned_pages=tenants.pinned(name),
            running=running[name],
            waiting=waiting[name],
            computed_tokens=scheduler.shares.computed_tokens[name],
        )
        for name in names
    }


def _pool_snapshot(
    pool: Pool, audit_runs: dict[str, int], leaked_pages: int, leak_repaired_pages: int
) -> PoolSnapshot:
    pages, counters, marks, layout = pool.pages, pool.counters, pool.watermarks, pool.layout
    written = sum(
        max(0, min(len(sequence.tokens), sequence.span_pages * layout.page_tokens))
        - (sequence.sealed_pages + sequence.dropped_pages) * layout.page_tokens
        for sequence in pool.sequences.values()
    )
    active_tokens = pages.sealed_active_tokens + written
    occupied_tokens = (pages.active + pages.cached + pages.pinned) * layout.page_tokens
    marks.observe(pool.occupied_pages, pool.capacity_pages, pool.now())
    return PoolSnapshot(
        capacity_pages=pool.capacity_pages,
        active_pages=pages.active,
        cached_pages=pages.cached,
        pinned_pages=pages.pinned,
        quarantined_pages=pages.quarantined,
        free_pages=pool.free_pages,
        dirty_pages=pages.sealed - pool.residency.clean_pages,
        shared_pages=pages.shared,
        deduplicated_bytes=(pages.references - pages.active) * layout.page_bytes,
        active_tokens=active_tokens,
        cached_tokens=pages.cached_tokens,
        pinned_tokens=pages.pinned_tokens,
        pin_limit_pages=pool.pins.limit_pages,
        promised_pages=pool.pins.promised_pages,
        pins=dict(counters.pins),
        packed_pages=pool.blocks.packed_pages,
        packed_blocks=pool.blocks.packed_blocks,
        committed_blocks=pool.blocks.committed_blocks,
        capacity_blocks=pool.blocks.limit_blocks,
        committed_bytes=pool.blocks.committed_blocks * layout.block_bytes,
        tail_waste_bytes=(
            occupied_tokens - active_tokens - pages.cached_tokens - pages.pinned_tokens
        )
        * layout.token_bytes,
        prefix_nodes=pool.tree.num_nodes,
        reclaiming=marks.reclaiming,
        watermark_high=marks.high,
        watermark_low=marks.low,
        watermark_crossings=dict(marks.crossings),
        above_watermark_seconds=dict(marks.above_seconds),
        allocations=dict(counters.allocations),
        evicted_pages=dict(counters.evicted),
        offloaded_pages=dict(counters.offloaded),
        dropped_pages=dict(counters.dropped),
        **_lower_tiers(pool),
        direct_reclaimed_pages=counters.evicted["allocation"],
        eviction_passes=counters.eviction_passes,
        regretted_pages=counters.regretted,
        prefix_query_tokens=counters.query_tokens,
        prefix_hit_tokens=dict(counters.hit_tokens),
        prefix_miss_tokens=dict(counters.miss_tokens),
        prefix_copies=counters.copies,
        audit_runs=dict(audit_runs),
        leaked_pages=leaked_pages,
        leak_repaired_pages=leak_repaired_pages,
        allocation_seconds=_histogram(counters.allocation_seconds),
        eviction_pass_seconds=_histogram(counters.eviction_pass_seconds),
        page_lifetime_seconds=_histogram(counters.lifetime_seconds),
        page_idle_before_eviction_seconds=_histogram(counters.idle_seconds),
        page_evict_to_reuse_seconds=_histogram(counters.evict_to_reuse_seconds),
    )


def _lower_tiers(pool: Pool) -> dict[str, Any]:
    """The fields about host and disk, and about the copies."""
    counters, disk = pool.counters, pool.disk
    under_way: Counter[str] = Counter()
    under_way.update(move.transfer.path for move in pool.residency.moves.values())
    under_way.update(move.transfer.path for move in disk.under_way.values())
    return {
        "host_capacity_pages": pool.host.capacity,
        "host_used_pages": pool.host.used,
        "host_pinned_pages": pool.host.pinned,
        "host_evicted_pages": counters.host_evicted,
        "disk_limit_bytes": disk.limit_bytes if disk.is_open else None,
        "disk_used_bytes": disk.index.used_bytes if disk.index.complete else None,
        "disk_pages": len(disk.index),
        "disk_wanted_pages": len(disk.wanted),
        "disk_evicted_pages": counters.disk_evicted,
        "disk_dropped_pages": dict(counters.disk_dropped),
        "disk_rejected_files": dict(counters.disk_rejected),
        "disk_fault": disk.fault,
        "transfers": {
            path: {outcome: counters.transfers[path, outcome] for outcome in ("ok", "failed")}
            for path in PATHS
        },
        "transferred_bytes": dict(counters.transferred_bytes),
        "transfers_under_way": {path: under_way[path] for path in PATHS},
        "transfer_seconds": {path: _histogram(h) for path, h in counters.transfer_seconds.items()},
        "late_transfers": counters.late_transfers,
        "prefetched_pages": dict(counters.prefetched),
    }


def _histogram(counts: HistogramCounts) -> Histogram:
    return Histogram(list(counts.buckets), list(counts.counts), counts.total)
