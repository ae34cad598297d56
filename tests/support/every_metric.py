"""Metrics of which every part is there and has been counted: nothing of the registry is absent."""

import time
from typing import Any, ClassVar

import msgspec
from http_stand import engine_snapshot
from scripted_nvml import GB, ScriptedNvml

from memd.config import Settings
from memd.engine.messages import GpuFacts, Ready
from memd.engine.snapshot_types import EngineSnapshot, PackingSnapshot, TenantSnapshot
from memd.histogram import JOB, HistogramCounts
from memd.observe.gpu import GpuReader
from memd.observe.metrics import Metrics
from memd.settings import LiveSettings

LAYOUT = {
    "page_tokens": 16,
    "page_bytes": 1024,
    "block_bytes": 16384,
    "block_waste_bytes": 64,
    "pages_per_block": 16,
    "packed_page_bytes": 640,
    "packed_pages_per_block": 25,
    "packed_block_waste_bytes": 384,
}
PACKING = PackingSnapshot(
    format="int8",
    due_pages={"packed": 30, "failed": 1, "no_room": 2},
    saved_bytes=3840,
    compression_ratio=1.2,
    mean_error=0.006,
    worst_error=0.009,
    most_error=0.02,
    load_error=0.008,
    warnings=[],
    stopped=None,
)


class Source:
    """An engine that has reported once."""

    restarts: ClassVar = {"killed": 0, "crashed": 0, "hung": 0}
    snapshot_at = 1000.0
    state = "ready"

    def __init__(self) -> None:
        self.ready: Ready | None = Ready(
            77, 100, {}, None, LAYOUT, GpuFacts("7a", 2 * GB, GB, pool_in_allocator=False)
        )
        tenants = {
            "acme": TenantSnapshot(8, 1.0, True, 5, 2, 1, 0, 90),
            "guest": TenantSnapshot(None, 1.0, False, 3, 0, 0, 2, 10),
        }
        self.snapshot: EngineSnapshot | None = msgspec.structs.replace(
            engine_snapshot(audit_runs={"clean": 1, "leak": 0}),
            tenants=tenants,
            last_step_age_seconds=2.0,
            packing=PACKING,
        )


class Counted:
    """Store, jobs, alerts and traces, as far as they are counted."""

    row_counts: ClassVar = {("events", "written"): 3, ("events", "dropped"): 0}
    queued_rows = 1
    database_bytes: int | None = 4096
    run_counts: ClassVar = {("sampling", "ok"): 2}
    run_seconds: ClassVar = {"sampling": HistogramCounts(JOB)}
    last_success_at: ClassVar = {"sampling": 1234.0}
    firing_counts: ClassVar = {"page": 1}
    notification_counts: ClassVar = {("hook", "sent"): 1}
    counts: ClassVar = {"recorded": 4, "dropped": 0}


def gpu_reader(source: Any) -> GpuReader:
    """A reader that has read the scripted board."""
    reader = GpuReader(source, 0.02, lambda: ScriptedNvml())
    reader.start()
    deadline = time.monotonic() + 60
    while reader.state is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return reader


def every_metric() -> Metrics:
    """All there is; end with `asyncio.run(metrics.gpu.stop())`."""
    source, counted = Source(), Counted()
    metrics = Metrics("m", source, LiveSettings(Settings()))
    metrics.history, metrics.jobs, metrics.alerts = counted, counted, counted
    metrics.traces = counted
    metrics.gpu = gpu_reader(source)
    return metrics
