"""Metrics of the operator plane: settings, jobs, history, alerts. Collected, never kept here."""

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from typing import Protocol

from prometheus_client.core import Metric

from memd import __version__
from memd.config import LIVE_KEYS, dump, flatten
from memd.observe.catalog.daemon import JOB_OUTCOMES, NOTIFICATION_OUTCOMES, ROW_OUTCOMES
from memd.observe.families import Counted, by_label, counter, gauge, histogram
from memd.settings import LiveSettings


class HistorySource(Protocol):
    """The store, as far as it is counted. Read on any thread."""

    @property
    def row_counts(self) -> Mapping[tuple[str, str], int]:
        """Rows by (table, "written" or "dropped"); every table is there."""

    @property
    def queued_rows(self) -> int:
        """Rows waiting for the database."""

    @property
    def database_bytes(self) -> int | None:
        """Size of the database as last read; None: not known."""


class TraceSource(Protocol):
    """The recorder of traces, as far as it is counted. Read on any thread."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Sequences, by "recorded" or "dropped"."""


class JobsSource(Protocol):
    """The daemon's jobs, as far as they are counted. Read on any thread."""

    @property
    def run_counts(self) -> Mapping[tuple[str, str], int]:
        """Runs by (job, "ok", "error", "missed" or "skipped"); every job is there."""

    @property
    def run_seconds(self) -> Mapping[str, Counted]:
        """Lengths of runs, by job."""

    @property
    def last_success_at(self) -> Mapping[str, float]:
        """Unix seconds of the last run that ended well, by job; jobs without one are left out."""


class AlertsSource(Protocol):
    """The built-in evaluation, as far as it is counted. Read on any thread."""

    @property
    def firing_counts(self) -> Mapping[str, int]:
        """Alerts that fire now, by severity."""

    @property
    def notification_counts(self) -> Mapping[tuple[str, str], int]:
        """Notifications by (channel, "sent", "failed" or "suppressed"); every channel is there."""


def history_metrics(store: HistorySource) -> Iterator[Metric]:
    """What the database takes, and what it has dropped."""
    yield counter("memd_history_rows", _by_pair(store.row_counts, ROW_OUTCOMES))
    yield gauge("memd_history_queue_rows", [((), store.queued_rows)])
    size = store.database_bytes
    if size is not None:
        yield gauge("memd_history_database_bytes", [((), size)])


def trace_metrics(traces: TraceSource) -> Iterator[Metric]:
    """What is recorded for the simulator."""
    yield counter("memd_trace_requests", by_label("memd_trace_requests", traces.counts))


def job_metrics(jobs: JobsSource) -> Iterator[Metric]:
    """Runs of the daemon's jobs."""
    yield counter("memd_job_runs", _by_pair(jobs.run_counts, JOB_OUTCOMES))
    yield histogram(
        "memd_job_duration_seconds", [((job,), each) for job, each in jobs.run_seconds.items()]
    )
    succeeded = jobs.last_success_at
    if succeeded:
        yield gauge(
            "memd_job_last_success_timestamp_seconds",
            [((job,), at) for job, at in succeeded.items()],
        )


def alert_metrics(alerts: AlertsSource) -> Iterator[Metric]:
    """Alerts and who has been told."""
    yield gauge("memd_alerts_firing", by_label("memd_alerts_firing", alerts.firing_counts))
    told = alerts.notification_counts
    if told:
        yield counter("memd_notifications", _by_pair(told, NOTIFICATION_OUTCOMES))


def _by_pair(
    counts: Mapping[tuple[str, str], int], outcomes: tuple[str, ...]
) -> list[tuple[tuple[str, str], float]]:
    """Every outcome of every first label value; 0 where nothing has been counted yet."""
    firsts = dict.fromkeys(first for first, _ in counts)
    return [
        ((first, outcome), counts.get((first, outcome), 0))
        for first in firsts
        for outcome in outcomes
    ]


class SettingValues:
    """The live settings that are numbers, in base units.

    Args:
        live: The settings in force; what the engine has made of them it reports itself.
    """

    def __init__(self, live: LiveSettings) -> None:
        self._live = live
        self._revision = 0
        self._values: dict[str, float] = {}

    def read(self, reported: Mapping[str, float]) -> dict[str, float]:
        """By key, in order; what the engine reports goes before what it was told."""
        revision = self._live.revision
        if revision != self._revision:
            flat = flatten(dump(self._live.current))
            live = {key: flat[key] for key in LIVE_KEYS}
            self._values = {
                key: float(value) for key, value in live.items() if isinstance(value, int | float)
            }
            self._revision = revision
        return dict(sorted({**self._values, **reported}.items()))


@cache
def versions() -> dict[str, str]:
    """Versions in use, by the labels of `memd_build_info`."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {
        "version": __version__,
        "python": python,
        "torch": _version("torch"),
        "triton": _version("triton"),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"
