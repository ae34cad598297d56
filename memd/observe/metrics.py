"""All metrics of the daemon, collected when they are asked for.

Counts and histograms of the HTTP side live here as plain objects; everything of the engine comes
from its latest snapshot, so that the states of the pool always add up. Every counter exists from
the first scrape with all values of its labels; a gauge whose value is not known is absent.
"""

import logging
from collections.abc import Iterable, Iterator
from importlib import metadata
from itertools import product

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from memd import __version__
from memd.config import LIVE_KEYS
from memd.engine.messages import Histogram
from memd.histogram import LATENCY, HistogramCounts
from memd.observe.engine_metrics import EngineSource, engine_metrics
from memd.observe.families import counter, gauge, histogram
from memd.settings import LiveSettings

TOKEN_GAP = (
    *(0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
)
DURATION = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
LENGTH = (1.0, 16.0, 64.0, 256.0, *(float(1024 << doubling) for doubling in range(9)))

GENERATING = ("chat_completions", "completions")
ENDPOINTS = (*GENERATING, "models", "tokenize", "detokenize", "admin", "other")
OUTCOMES = ("ok", "invalid", "unauthorized", "overloaded", "timeout", "cancelled", "error")
STATES = ("loading", "ready", "restarting", "draining", "failed")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


class Metrics(Collector):
    """One per daemon, with a registry of its own.

    Args:
        model: Served name, the only value of the label `model`.
        source: Gives the engine's latest snapshot.
        live: The settings in force here; the engine's snapshot has those that are in force there.
    """

    def __init__(self, model: str, source: EngineSource, live: LiveSettings) -> None:
        self._model = model
        self._source = source
        self._live = live
        self.requests = dict.fromkeys(product(ENDPOINTS, OUTCOMES), 0)
        self.setting_changes = dict.fromkeys(product(sorted(LIVE_KEYS), ("applied", "rejected")), 0)
        self.log_messages = dict.fromkeys(LOG_LEVELS, 0)
        self.request_duration = {endpoint: HistogramCounts(DURATION) for endpoint in GENERATING}
        self.time_to_first_token = HistogramCounts(LATENCY)
        self.inter_token_latency = HistogramCounts(TOKEN_GAP)
        self.time_per_output_token = HistogramCounts(TOKEN_GAP)
        self.request_prompt_tokens = HistogramCounts(LENGTH)
        self.request_generated_tokens = HistogramCounts(LENGTH)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Body and content type for an `Accept` header. Safe on any thread."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are checked by tests, not at registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families, once for each scrape."""
        yield from engine_metrics(self._model, self._source)
        yield from self._request_metrics()
        yield from self._daemon_metrics()

    def _request_metrics(self) -> Iterator[Metric]:
        model = self._model
        yield counter(
            "memd_requests",
            "HTTP requests",
            ("model", "endpoint", "outcome"),
            [((model, *key), count) for key, count in self.requests.items()],
        )
        yield histogram(
            "memd_request_duration_seconds",
            "From the request's arrival to the last byte of its answer",
            ("model", "endpoint"),
            [((model, key), _sealed(counts)) for key, counts in self.request_duration.items()],
        )
        for name, text, counts in (
            (
                "time_to_first_token_seconds",
                "From the request's arrival to a sequence's first token",
                self.time_to_first_token,
            ),
            (
                "inter_token_latency_seconds",
                "Gap between two outputs of a sequence",
                self.inter_token_latency,
            ),
            (
                "time_per_output_token_seconds",
                "Mean gap between the tokens of a sequence",
                self.time_per_output_token,
            ),
            ("request_prompt_tokens", "Length of a prompt", self.request_prompt_tokens),
            ("request_generated_tokens", "Length of an output", self.request_generated_tokens),
        ):
            yield histogram(f"memd_{name}", text, ("model",), [((model,), _sealed(counts))])

    def _daemon_metrics(self) -> Iterator[Metric]:
        versions = {
            "version": __version__,
            "torch": _version("torch"),
            "triton": _version("triton"),
        }
        yield gauge("memd_build_info", "1", tuple(versions), [(tuple(versions.values()), 1)])
        yield gauge(
            "memd_state",
            "1 for the state the daemon is in",
            ("state",),
            [((state,), state == self._source.state) for state in STATES],
        )
        yield counter(
            "memd_engine_restarts",
            "Restarts of the engine; what the engine itself counts begins at 0 with each",
            ("reason",),
            [((reason,), count) for reason, count in self._source.restarts.items()],
        )
        snapshot = self._source.snapshot
        values = dict(snapshot.settings) if snapshot else {}
        values["engine.max_waiting"] = self._live.current.engine.max_waiting
        yield gauge(
            "memd_setting",
            "Value in force of each live setting, in base units",
            ("key",),
            [((key,), value) for key, value in sorted(values.items())],
        )
        yield counter(
            "memd_setting_changes",
            "Changes of live settings",
            ("key", "outcome"),
            self.setting_changes.items(),
        )
        yield counter(
            "memd_log_messages",
            "Log lines of the api process",
            ("level",),
            [((level,), count) for level, count in self.log_messages.items()],
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


def _sealed(counts: HistogramCounts) -> Histogram:
    return Histogram(list(counts.buckets), list(counts.counts), counts.total)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"
