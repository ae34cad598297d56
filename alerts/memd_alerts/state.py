"""What is kept of alerts between two evaluations, and across a restart: plain data."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

AlertState = Literal["pending", "firing", "resolved"]


class Alert(msgspec.Struct, frozen=True):
    """One alert: a rule, for one set of labels.

    Args:
        id: Of this life of it.
        rule: Name.
        labels: All, with alertname, severity and instance; they tell alerts apart.
        state: Resolved ones are kept for a while, so that everybody is told.
        summary: One line.
        value: The latest known; None where there was nothing to divide by.
        threshold: What it was compared with.
        peak: The worst value since it began.
        since: Unix seconds; when the condition began to hold.
        known_at: When it was last evaluated on data that were there.
        fired_at: When it was pending long enough.
        resolved_at: When it ended.
        lost: It ended because there were no data for long, not because all was well.
        told: The last state that each channel was told.
    """

    id: str
    rule: str
    labels: dict[str, str]
    state: AlertState
    summary: str
    value: float | None
    threshold: float | None
    peak: float | None
    since: float
    known_at: float
    fired_at: float | None = None
    resolved_at: float | None = None
    lost: bool = False
    told: dict[str, AlertState] = {}


class Silence(msgspec.Struct, frozen=True):
    """Alerts that nobody is told about for a time.

    Args:
        id: Short, unique.
        matchers: Label to value or pattern (`*`, `?`); all must match.
        starts_at: Unix seconds.
        ends_at: Unix seconds.
        reason: Why.
        author: Who.
    """

    id: str
    matchers: dict[str, str]
    starts_at: float
    ends_at: float
    reason: str
    author: str

    def covers(self, labels: Mapping[str, str], now: float) -> bool:
        """Whether an alert with these labels is silenced now."""
        return self.starts_at <= now < self.ends_at and all(
            name in labels and fnmatchcase(labels[name], pattern)
            for name, pattern in self.matchers.items()
        )


class ChannelState(msgspec.Struct, frozen=True):
    """How notifications over one channel went.

    Args:
        sent_at: Unix seconds of the messages of the last minute.
        failures: In a row.
        retry_at: Not before, after a failure.
        last_sent_at: When a message last arrived.
        last_error: Of the latest failure since; without anything secret.
    """

    sent_at: list[float] = []
    failures: int = 0
    retry_at: float = 0.0
    last_sent_at: float | None = None
    last_error: str | None = None


class State(msgspec.Struct, frozen=True):
    """Everything the evaluation remembers.

    Args:
        evaluated_at: Unix seconds of the latest evaluation.
        alerts: Pending, firing, and resolved lately.
        silences: In force, and those that are over but not yet dropped.
        channels: By name.
    """

    evaluated_at: float | None = None
    alerts: list[Alert] = []
    silences: list[Silence] = []
    channels: dict[str, ChannelState] = {}

    def silenced(self, alert: Alert, now: float) -> Silence | None:
        """The silence that covers an alert."""
        return next((each for each in self.silences if each.covers(alert.labels, now)), None)


def label_key(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What tells alerts apart."""
    return tuple(sorted(labels.items()))
