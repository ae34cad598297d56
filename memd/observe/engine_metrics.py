"""The engine's metrics, from its latest snapshot.

Before the first snapshot counters and histograms are at zero and gauges are absent.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import Metric

from memd.engine.messages import Ready
from memd.engine.snapshot_types import EngineSnapshot
from memd.observe.catalog.engine import MODES
from memd.observe.elastic_metrics import elastic_metrics
from memd.observe.families import by_label, counter, gauge, histogram
from memd.observe.packing_metrics import packing_metrics
from memd.observe.pool_metrics import pool_metrics
from memd.observe.registry import FAMILIES
from memd.observe.tenant_metrics import tenant_metrics
from memd.observe.tier_metrics import tier_metrics


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
    ready, snapshot = source.ready, source.snapshot
    pool = snapshot.pool if snapshot else None
    layout = ready.pool if ready else None
    shrinking = snapshot is not None and snapshot.elastic.limit_waits_for is not None
    yield from pool_metrics(model, pool, layout, shrinking)
    yield from elastic_metrics(snapshot.elastic if snapshot else None, layout)
    yield from packing_metrics(snapshot)
    yield from tier_metrics(pool, layout)
    if ready is not None:
        table = ready.launch_table or "none"
        yield gauge("memd_kernel_launch_table", by_label("memd_kernel_launch_table", {table: 1}))
    if snapshot is not None:
        yield from _gauges(model, snapshot, source.snapshot_at)
    yield from _sequences(model, snapshot)
    yield from tenant_metrics(snapshot)
    yield from _steps(model, snapshot)


def _gauges(model: str, snapshot: EngineSnapshot, snapshot_at: float) -> Iterator[Metric]:
    yield gauge("memd_requests_running", [((model,), snapshot.running)])
    yield gauge(
        "memd_requests_waiting", by_label("memd_requests_waiting", snapshot.waiting, (model,))
    )
    age = snapshot.last_step_age_seconds
    if age is not None:
        yield gauge("memd_engine_last_step_timestamp_seconds", [((model,), snapshot_at - age)])
    yield gauge("memd_engine_last_report_timestamp_seconds", [((model,), snapshot_at)])


def _sequences(model: str, snapshot: EngineSnapshot | None) -> Iterator[Metric]:
    for name, field in (
        ("memd_finished_sequences", "finished"),
        ("memd_prompt_tokens", "prompt_tokens"),
    ):
        values = getattr(snapshot, field) if snapshot else None
        yield counter(name, by_label(name, values, (model,)))
    yield counter(
        "memd_preemptions", [((model, "recompute"), snapshot.preemptions if snapshot else 0)]
    )
    for field in ("recomputed_tokens", "generated_tokens", "nan_logits"):
        yield counter(f"memd_{field}", [((model,), getattr(snapshot, field) if snapshot else 0)])
    waited = snapshot.queue_seconds if snapshot else None
    yield histogram("memd_queue_duration_seconds", [((model,), waited)])
    stalls = snapshot.stall_seconds if snapshot else {}
    causes = FAMILIES["memd_kv_stall_seconds"].labels["cause"]
    yield histogram(
        "memd_kv_stall_seconds", [((model, cause), stalls.get(cause)) for cause in causes]
    )


def _steps(model: str, snapshot: EngineSnapshot | None) -> Iterator[Metric]:
    steps = snapshot.steps if snapshot else {}
    replayed = snapshot.replayed_steps if snapshot else {}
    samples = []
    for mode in MODES:
        all_steps, from_graphs = steps.get(mode, 0), replayed.get(mode, 0)
        samples.append(((model, mode, "replayed"), from_graphs))
        samples.append(((model, mode, "eager"), all_steps - from_graphs))
    yield counter("memd_engine_steps", samples)
    shared = snapshot.shared_prefix_steps if snapshot else 0
    yield counter("memd_engine_shared_prefix_steps", [((model,), shared)])
    seconds = snapshot.step_seconds if snapshot else {}
    yield histogram(
        "memd_engine_step_seconds", [((model, mode), seconds.get(mode)) for mode in MODES]
    )
    waited = snapshot.wait_seconds if snapshot else 0
    yield counter("memd_engine_wait_seconds", [((model,), waited)])
