"""What the engine says of itself. Part of `memd.engine.messages`."""

from typing import Any

import msgspec

from memd.types import LimitWait


class EngineEvent(msgspec.Struct, frozen=True):
    """Something that an operator may want to find in the history."""

    kind: str
    message: str
    details: dict[str, Any]


class Histogram(msgspec.Struct, frozen=True, array_like=True):
    """Counts since the start, one for each bucket and one for +Inf; each value counted once."""

    buckets: list[float]
    counts: list[int]
    total: float


class ElasticSnapshot(msgspec.Struct, frozen=True):
    """The elastic pool at the end of a step. Blocks and pages count since the engine's start."""

    limit_pages: int  # that the settings allow
    max_model_len: int  # that this limit and the model allow, tokens
    target_pages: int  # the same, or less while the device is short of memory
    limit_waits_for: LimitWait | None  # what keeps the pool above its target
    fragmentation_ratio: float
    max_fragmentation_ratio: float  # that runs keep it below
    empty_blocks: int  # with memory, that hold nothing
    defrag_running: bool
    defrag_runs: dict[str, dict[str, int]]  # by reason and outcome: "completed", "failed"
    defrag_moved_pages: int
    defrag_moved_bytes: int
    defrag_last_run: dict[str, Any] | None  # or the one under way
    defrag_step_seconds: tuple[list[float], list[int], float]  # see `Histogram`
    grown_blocks: dict[str, int]  # by reason: "demand", "ahead"
    shrunk_blocks: dict[str, int]  # by reason: "limit", "pressure", "idle", "admin"
    under_pressure: bool  # others on the device need memory
    device_free_bytes: int | None  # None: not known


class PackingSnapshot(msgspec.Struct, frozen=True):
    """Packed pages at the end of a step. Errors are relative, of keys or values."""

    format: str
    due_pages: dict[str, int]  # since the engine's start, by outcome: "packed", or why they stayed
    # full: "failed", "no_room"
    saved_bytes: int  # against the same pages in full
    compression_ratio: float | None  # bytes of all pages in use, were they full, to what they take
    mean_error: float | None  # since the engine's start, over pages, layers and heads
    worst_error: float | None  # likewise, of one page, layer and head
    most_error: float  # of a layer and head, beyond which packing stops
    load_error: float  # of the layer and head that lost most when the model was loaded
    warnings: list[str]  # what may cost quality, as seen when the model was loaded
    stopped: str | None  # why no more pages are packed


class PoolSnapshot(msgspec.Struct, frozen=True):
    """The pool at the end of a step.

    active + cached + pinned + quarantined + free == capacity, in pages.
    """

    capacity_pages: int
    active_pages: int
    cached_pages: int
    pinned_pages: int  # without references, kept from eviction
    quarantined_pages: int
    free_pages: int
    dirty_pages: int
    shared_pages: int  # held by two sequences or more
    deduplicated_bytes: int
    active_tokens: int
    cached_tokens: int
    pinned_tokens: int
    pin_limit_pages: int
    promised_pages: int  # under pins, held or not
    pins: dict[str, int]  # by what became of them
    packed_pages: int  # of those that are not free
    packed_blocks: int  # of those with memory: cut into packed pages
    committed_blocks: int
    capacity_blocks: int
    committed_bytes: int
    tail_waste_bytes: int
    prefix_nodes: int
    reclaiming: bool
    watermark_high: float
    watermark_low: float
    watermark_crossings: dict[str, int]  # "high.up", "high.down", "low.up", "low.down"
    above_watermark_seconds: dict[str, float]  # "high", "low"
    allocations: dict[str, int]  # pages: "free", "evicted"; attempts: "failed"
    evicted_pages: dict[str, int]  # by reason
    offloaded_pages: dict[str, int]  # of those: still on the host; by reason
    dropped_pages: dict[str, int]  # let go by running sequences; by policy
    host_capacity_pages: int
    host_used_pages: int
    host_pinned_pages: int
    host_evicted_pages: int
    disk_limit_bytes: int | None  # None: no disk tier
    disk_used_bytes: int | None  # None: not known yet
    disk_pages: int
    disk_wanted_pages: int  # to be written
    disk_evicted_pages: int
    disk_dropped_pages: dict[str, int]  # to be written and were not, by reason
    disk_rejected_files: dict[str, int]  # of no use and removed, by reason
    disk_fault: str | None  # why nothing is read or written at present
    transfers: dict[str, dict[str, int]]  # by path (memd.types) and outcome "ok", "failed"
    transferred_bytes: dict[str, int]  # by path, of those that ended well
    transfers_under_way: dict[str, int]  # by path
    transfer_seconds: dict[str, Histogram]  # by path, from the order to the report
    late_transfers: int  # reports of copies that nobody waited for
    prefetched_pages: dict[str, int]  # by outcome: "used", "late", "wasted", "cancelled"
    direct_reclaimed_pages: int
    eviction_passes: int
    regretted_pages: int
    prefix_query_tokens: int
    prefix_hit_tokens: dict[str, int]  # by tier
    prefix_miss_tokens: dict[str, int]  # by reason
    prefix_copies: int
    audit_runs: dict[str, int]  # "clean", "leak"
    leaked_pages: int  # found by the last audit
    leak_repaired_pages: int
    allocation_seconds: Histogram
    eviction_pass_seconds: Histogram
    page_lifetime_seconds: Histogram
    page_idle_before_eviction_seconds: Histogram
    page_evict_to_reuse_seconds: Histogram


class TenantSnapshot(msgspec.Struct, frozen=True):
    """What one tenant has, at the end of a step."""

    quota_pages: int | None  # None: no quota
    weight: float
    configured: bool  # named in the settings
    used_pages: int  # charged: each page to the first that held it
    pinned_pages: int  # of those: under pins, held or not
    running: int
    waiting: int
    computed_tokens: int  # since the engine's start


class EngineSnapshot(msgspec.Struct, frozen=True):
    """The engine at the end of a step. Sent with each batch of outputs that changed it."""

    revision: int  # of the settings in force
    steps: dict[str, int]  # by mode: "prefill", "decode", "mixed"
    replayed_steps: dict[str, int]  # of those: all of it from CUDA graphs; by mode
    shared_prefix_steps: int  # of those: a prefix was read once for several sequences
    step_seconds: dict[str, Histogram]  # by mode
    last_step_age_seconds: float | None  # None: no step yet
    running: int
    waiting: dict[str, int]  # by reason: "capacity", "quota", "prefix", "transfer"
    finished: dict[str, int]  # by finish reason
    preemptions: int
    recomputed_tokens: int
    prompt_tokens: dict[str, int]  # by source: "computed", "device", "host", "disk"
    generated_tokens: int
    queue_seconds: Histogram
    stall_seconds: dict[str, Histogram]  # waits for memory, by cause
    nan_logits: int
    allocator_bytes: int | None  # taken by torch's allocator; None: no GPU
    wait_seconds: float  # for the device, after the host's part of steps was done
    settings: dict[str, float]  # live values in force, base units
    elastic: ElasticSnapshot
    pool: PoolSnapshot
    tenants: dict[str, TenantSnapshot]  # by name; "": requests without a key
    packing: PackingSnapshot | None = None  # None: all pages are full
