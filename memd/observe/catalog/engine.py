"""Declarations: the engine's steps and sequences."""

from typing import get_args

from memd.histogram import LATENCY, STEP
from memd.observe.catalog.common import MODEL, NO_REPORT
from memd.observe.family import Family
from memd.types import FinishReason, Tier

MODES = ("prefill", "decode", "mixed")

SEQUENCES = (
    Family("memd_requests_running", "gauge", "Sequences in the batch", MODEL, absent=NO_REPORT),
    Family(
        "memd_requests_waiting",
        "gauge",
        "Sequences that wait to start: for room, for their tenant's quota, for a prefix that "
        "another computes, for pages on their way",
        {**MODEL, "reason": ("capacity", "quota", "prefix", "transfer")},
        absent=NO_REPORT,
    ),
    Family(
        "memd_finished_sequences",
        "counter",
        "Sequences ended",
        {**MODEL, "reason": get_args(FinishReason)},
    ),
    Family("memd_preemptions", "counter", "Sequences preempted", {**MODEL, "mode": ("recompute",)}),
    Family(
        "memd_prompt_tokens",
        "counter",
        "Prompt tokens, by where their KV came from",
        {**MODEL, "source": ("computed", *get_args(Tier))},
    ),
    Family(
        "memd_recomputed_tokens", "counter", "Tokens computed again, as their KV was lost", MODEL
    ),
    Family("memd_generated_tokens", "counter", "Tokens generated", MODEL),
    Family("memd_nan_logits", "counter", "Sequences ended by logits that are no numbers", MODEL),
    Family(
        "memd_queue_duration_seconds", "histogram", "Waiting before the first step", MODEL, LATENCY
    ),
    Family(
        "memd_kv_stall_seconds",
        "histogram",
        "Time a sequence waited for memory: to start when pages were too few (allocation) or on "
        "their way (transfer), and to go on when it had been preempted",
        {**MODEL, "cause": ("allocation", "transfer", "preempted")},
        LATENCY,
    ),
)

_TENANT = {"tenant": "tenants named in the settings; all others are `other`"}

TENANTS = (
    Family(
        "memd_tenant_quota_pages",
        "gauge",
        "Pages that a tenant may keep when others need room",
        _TENANT,
        absent="where a tenant has no quota",
    ),
    Family(
        "memd_tenant_used_pages",
        "gauge",
        "Pages charged to a tenant: each to the first that held it",
        _TENANT,
        absent=NO_REPORT,
    ),
    Family(
        "memd_tenant_pinned_pages",
        "gauge",
        "Pages under a tenant's pins, held by sequences or not",
        _TENANT,
        absent=NO_REPORT,
    ),
    Family(
        "memd_tenant_sequences",
        "gauge",
        "Sequences of a tenant",
        {**_TENANT, "state": ("running", "waiting")},
        absent=NO_REPORT,
    ),
    Family("memd_tenant_computed_tokens", "counter", "Tokens computed for a tenant", _TENANT),
    Family(
        "memd_tenant_rejections",
        "counter",
        "Requests of a tenant refused: a full queue, the same while it is above its quota, a "
        "priority that its key does not allow",
        {**_TENANT, "reason": ("queue", "quota", "priority")},
    ),
)

STEPS = (
    Family(
        "memd_engine_steps",
        "counter",
        "Steps of the engine; replayed: all of it from CUDA graphs",
        {**MODEL, "mode": MODES, "graph": ("replayed", "eager")},
    ),
    Family(
        "memd_engine_shared_prefix_steps",
        "counter",
        "Steps in which a prefix was read once for several sequences",
        MODEL,
    ),
    Family(
        "memd_engine_step_seconds",
        "histogram",
        "Wall time of one step",
        {**MODEL, "mode": MODES},
        STEP,
    ),
    Family(
        "memd_engine_wait_seconds",
        "counter",
        "Time in which the engine's host side waited for the device",
        MODEL,
    ),
    Family(
        "memd_engine_last_step_timestamp_seconds",
        "gauge",
        "When the last step ended",
        MODEL,
        absent="until the first step of an engine",
    ),
    Family(
        "memd_engine_last_report_timestamp_seconds",
        "gauge",
        "When the engine last told its state: all its gauges are of then",
        MODEL,
        absent=NO_REPORT,
    ),
    Family(
        "memd_kernel_launch_table",
        "gauge",
        "1 for where kernels' launch parameters come from; none: the CPU has no such kernels",
        {"source": ("user", "shipped", "default", "none")},
        absent=NO_REPORT,
    ),
)
