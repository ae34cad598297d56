"""What the daemon's jobs do: sampling, alerts, retention, idle audit and defragmentation."""

import asyncio
import time
from collections.abc import Callable, Sequence
from socket import gethostname
from urllib.parse import urlsplit

from memd.alert_trial import RuleSamples
from memd.alerting import Alerting
from memd.api.engine_client import EngineClient
from memd.api.job_commands import skipped_without_engine
from memd.api.trace_recorder import TraceRecorder
from memd.config import Settings, state_dir
from memd.disk_events import DiskEvents
from memd.engine.messages import PoolCommand
from memd.errors import MemdError
from memd.jobs import Job, JobSkipped
from memd.observe.metrics import Metrics
from memd.settings import LiveSettings
from memd.store.store import Store
from memd.store.traces import size_cutoff

RETENTION_SECONDS = 3600.0
TRACE_RETENTION_SECONDS = 60.0
AUDIT_SECONDS = 300.0
DEFRAG_SECONDS = 60.0

# What charts look back at. Each series costs a row a sample, so histograms are left out; of
# latencies the alerts' records keep a quantile.
SAMPLED = frozenset(
    {
        "memd_pool_pages",
        "memd_pool_capacity_pages",
        "memd_pool_active_ratio",
        "memd_pool_occupied_ratio",
        "memd_pool_watermark_ratio",
        "memd_pool_mapped_bytes",
        "memd_pool_fragmentation_ratio",
        "memd_pool_waste_bytes",
        "memd_requests_running",
        "memd_requests_waiting",
        "memd_requests_total",
        "memd_generated_tokens_total",
        "memd_prompt_tokens_total",
        "memd_prefix_query_tokens_total",
        "memd_prefix_hit_tokens_total",
        "memd_prefix_miss_tokens_total",
        "memd_evicted_pages_total",
        "memd_direct_reclaimed_pages_total",
        "memd_regretted_pages_total",
        "memd_preemptions_total",
        "memd_recomputed_tokens_total",
        "memd_tier_used_bytes",
        "memd_transfer_bytes_total",
        "memd_transfer_queue_pages",
        "memd_prefetched_pages_total",
        "memd_tenant_used_bytes",
        "memd_engine_restarts_total",
        "memd_alerts_firing",
        "memd_gpu_memory_bytes",
        "memd_gpu_utilization_ratio",
        "memd_gpu_temperature_celsius",
        "memd_gpu_power_watts",
    }
)
_NEVER_USED = ("models", "tokenize", "detokenize", "admin", "other")  # endpoints nobody charts


def build_alerting(
    settings: Settings, urls: Sequence[str], metrics: Metrics, store: Store
) -> Alerting | None:
    """The evaluation of alerts; None where it is off.

    Args:
        settings: Rules and channels.
        urls: Where the daemon listens.
        metrics: Give the samples.
        store: Gets the history.
    """
    if not settings.alerts.enabled:
        return None
    instance = settings.alerts.instance or instance_of(urls)
    return Alerting(settings.alerts, state_dir(settings), instance, metrics.samples, store)


def instance_of(urls: Sequence[str]) -> str:
    """The label `instance` that Prometheus gives a daemon: host:port, or the host's name."""
    for url in urls:
        parts = urlsplit(url)
        if parts.hostname is not None and parts.port is not None:
            everywhere = parts.hostname in ("0.0.0.0", "::")
            host = gethostname() if everywhere else parts.hostname
            return f"[{host}]:{parts.port}" if ":" in host else f"{host}:{parts.port}"
    return gethostname()


def build_jobs(
    settings: Settings,
    engine: EngineClient,
    metrics: Metrics,
    store: Store,
    alerting: Alerting | None,
    clock: Callable[[], float] = time.time,
) -> list[Job]:
    """The daemon's jobs.

    Args:
        settings: How often.
        engine: Does the audit.
        metrics: Give the samples.
        store: Keeps them, and is pruned.
        alerting: None: alerts are off.
        clock: Unix seconds.
    """

    rule_samples = RuleSamples(alerting.rules, SAMPLED) if alerting is not None else None
    disk_events = DiskEvents(store)

    async def sample() -> None:
        now = clock()
        if engine.snapshot is not None:
            disk_events.look(engine.snapshot.pool)
        found = await asyncio.to_thread(metrics.samples)
        kept = [
            (each.name, each.labels, each.value)
            for each in found
            if each.name in SAMPLED
            and each.value == each.value
            and each.labels.get("endpoint") not in _NEVER_USED
        ]
        if alerting is not None and rule_samples is not None:
            kept += alerting.recorded()
            kept += rule_samples.due(now, found)
        rows = [{"time": now, "metric": m, "labels": ls, "value": v} for m, ls, v in kept]
        store.add_rows("samples", rows)

    audited_steps: dict[str, int] | None = None

    async def audit() -> None:
        nonlocal audited_steps
        snapshot = engine.snapshot
        if engine.ready is None or snapshot is None:
            raise JobSkipped("the engine does not serve")
        if snapshot.running or sum(snapshot.waiting.values()):
            raise JobSkipped("requests are running")
        if snapshot.steps == audited_steps:
            raise JobSkipped("nothing has happened since the last one")
        audited_steps = snapshot.steps
        with skipped_without_engine():
            report = await engine.command(PoolCommand, action="audit", pages=None)
        if not report["clean"]:
            problems = report["problems"]
            store.add_event("leak", f"the idle audit found {len(problems)} problems", dict(report))
            raise MemdError(f"the pool is not clean: {'; '.join(problems)[:300]}")

    async def defrag() -> None:
        snapshot = engine.snapshot
        if engine.ready is None or snapshot is None or not engine.ready.pool.get("elastic"):
            raise JobSkipped("the engine does not serve, or its memory is not elastic")
        if snapshot.running or sum(snapshot.waiting.values()):
            raise JobSkipped("requests are running")
        if not snapshot.elastic.fragmentation_ratio:
            raise JobSkipped("nothing is fragmented")
        with skipped_without_engine():
            await engine.command(PoolCommand, action="defrag", idle=True)

    history, alerts = settings.history, settings.alerts
    jobs = [
        Job("sampling", history.sample_every, 60.0, sample),
        Job("retention", RETENTION_SECONDS, 1800.0, store.prune),
        Job("idle_audit", AUDIT_SECONDS, 60.0, audit),
        Job("idle_defrag", DEFRAG_SECONDS, 60.0, defrag),
    ]
    if alerting is not None:
        jobs.insert(1, Job("alert_evaluation", alerts.evaluate_every, 60.0, alerting.evaluate))
    return jobs


def trace_retention(recorder: TraceRecorder, store: Store, live: LiveSettings) -> Job:
    """The job that keeps recorded traces below `trace.limit`, and their counts up to date.

    Args:
        recorder: Its sequences are what is kept.
        store: Keeps them.
        live: The limit in force.
    """
    done: tuple[int, int] | None = None

    async def trim() -> None:
        nonlocal done
        recorder.keep_alive()
        limit = live.current.trace.limit
        state = (recorder.counts["recorded"], limit)
        if state == done:
            return
        cutoff = await store.query(lambda session: size_cutoff(session, limit))
        if cutoff is not None:
            await store.delete_before({"trace_requests": cutoff})
        done = state

    return Job("trace_retention", TRACE_RETENTION_SECONDS, 1800.0, trim)
