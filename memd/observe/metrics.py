"""All metrics of the daemon, collected when they are asked for.

Counts and histograms of the HTTP side live here as plain objects; everything of the engine comes
from its latest snapshot, so that the states of the pool always add up. Every counter exists from
the first scrape with all values of its labels; a gauge whose value is not known is absent.
"""

import logging
from collections.abc import Iterable, Iterator
from itertools import product

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from memd.histogram import DURATION, LATENCY, LENGTH, TOKEN_GAP, HistogramCounts
from memd.observe.catalog.daemon import LOG_LEVELS
from memd.observe.catalog.requests import ENDPOINTS, GENERATING, OUTCOMES
from memd.observe.daemon_metrics import (
    AlertsSource,
    HistorySource,
    JobsSource,
    SettingValues,
    TraceSource,
    alert_metrics,
    history_metrics,
    job_metrics,
    trace_metrics,
    versions,
)
from memd.observe.engine_metrics import EngineSource, engine_metrics
from memd.observe.families import by_label, counter, gauge, histogram
from memd.observe.gpu import GpuReader
from memd.observe.gpu_metrics import gpu_metrics
from memd.observe.tenant_metrics import Rejections
from memd.settings import LiveSettings


class Metrics(Collector):
    """One per daemon, with a registry of its own.

    Args:
        model: Served name, the only value of the label `model`.
        source: Gives the engine's latest snapshot.
        live: The settings in force here; the engine's snapshot has those that are in force there.

    Attributes:
        gpu: Reads the GPU; None: its metrics are absent.
        history, jobs, alerts, traces: Parts of the operator plane that are counted, once they
            exist.
    """

    def __init__(self, model: str, source: EngineSource, live: LiveSettings) -> None:
        self._model = model
        self._source = source
        self._live = live
        self._settings = SettingValues(live)
        self.gpu: GpuReader | None = None
        self.history: HistorySource | None = None
        self.jobs: JobsSource | None = None
        self.alerts: AlertsSource | None = None
        self.traces: TraceSource | None = None
        self.requests = dict.fromkeys(product(ENDPOINTS, OUTCOMES), 0)
        self.rejections = Rejections()
        self.log_messages = dict.fromkeys(LOG_LEVELS, 0)
        self.request_duration = {endpoint: HistogramCounts(DURATION) for endpoint in GENERATING}
        self.time_to_first_token = HistogramCounts(LATENCY)
        self.inter_token_latency = HistogramCounts(TOKEN_GAP)
        self.time_per_output_token = HistogramCounts(TOKEN_GAP)
        self.request_prompt_tokens = HistogramCounts(LENGTH)
        self.request_generated_tokens = HistogramCounts(LENGTH)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Body and content type for an `Accept` header. Safe on any thread."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def samples(self) -> list[Sample]:
        """What a scrape would show now, by scraped names such as `memd_requests_total`.

        Safe on any thread.
        """
        return [sample for family in self._registry.collect() for sample in family.samples]

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are checked by tests, not at registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families, once for each scrape."""
        yield from engine_metrics(self._model, self._source)
        yield from self._request_metrics()
        yield self.rejections.metric([tenant.name for tenant in self._live.current.tenants])
        yield from self._daemon_metrics()
        yield from self._setting_metrics()
        yield from gpu_metrics(self.gpu)
        if self.history is not None:
            yield from history_metrics(self.history)
        if self.jobs is not None:
            yield from job_metrics(self.jobs)
        if self.alerts is not None:
            yield from alert_metrics(self.alerts)
        if self.traces is not None:
            yield from trace_metrics(self.traces)

    def _request_metrics(self) -> Iterator[Metric]:
        model = self._model
        yield counter(
            "memd_requests", [((model, *key), count) for key, count in self.requests.items()]
        )
        yield histogram(
            "memd_request_duration_seconds",
            [((model, endpoint), counts) for endpoint, counts in self.request_duration.items()],
        )
        for name, counts in (
            ("time_to_first_token_seconds", self.time_to_first_token),
            ("inter_token_latency_seconds", self.inter_token_latency),
            ("time_per_output_token_seconds", self.time_per_output_token),
            ("request_prompt_tokens", self.request_prompt_tokens),
            ("request_generated_tokens", self.request_generated_tokens),
        ):
            yield histogram(f"memd_{name}", [((model,), counts)])

    def _daemon_metrics(self) -> Iterator[Metric]:
        yield gauge("memd_build_info", [(tuple(versions().values()), 1)])
        yield gauge("memd_state", by_label("memd_state", {self._source.state: 1}))
        yield counter(
            "memd_engine_restarts", by_label("memd_engine_restarts", self._source.restarts)
        )
        yield counter("memd_log_messages", by_label("memd_log_messages", self.log_messages))

    def _setting_metrics(self) -> Iterator[Metric]:
        snapshot = self._source.snapshot
        values = self._settings.read(snapshot.settings if snapshot else {})
        yield gauge("memd_setting", [((key,), value) for key, value in values.items()])
        yield counter("memd_setting_changes", self._live.counts.items())
        yield gauge("memd_settings_revision", [((), self._live.revision)])
        reload = self._live.last_reload
        yield gauge("memd_config_last_reload_successful", [((), reload.error is None)])
        yield gauge(
            "memd_config_last_reload_success_timestamp_seconds", [((), reload.succeeded_at)]
        )


class LogCounter(logging.Handler):
    """Counts log records by level."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._counts = metrics.log_messages

    def emit(self, record: logging.LogRecord) -> None:
        """Count one record."""
        level = record.levelname.lower()
        if level in self._counts:
            self._counts[level] += 1
