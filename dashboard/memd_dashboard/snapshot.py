"""What the pages read: the daemon's answers of one moment, with their age. Nothing here does I/O
but the functions in TOPICS, which the feed calls on its own thread.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from memd.client import Client
from memd_dashboard.scrape import Scrape, Window, parse

JSON = dict[str, Any]

STALE_SECONDS = 2.5  # without any answer for so long, what is shown is called old
HOUR_SECONDS = 3600.0
DAY_SECONDS = 86400.0
HISTORY_STEP_SECONDS = 60.0


@dataclass(frozen=True)
class Topic:
    """One question to the daemon.

    Args:
        ask: Calls the daemon.
        every_seconds: Least time between two questions.
    """

    ask: Callable[[Client], Any]
    every_seconds: float


@dataclass(frozen=True)
class Reading:
    """The last answer to one question.

    Args:
        value: None until there was one.
        at: When it came, Unix seconds.
        problem: What the latest attempt said, when it failed.
        missing: The daemon has no such route.
    """

    value: Any = None
    at: float | None = None
    problem: str | None = None
    missing: bool = False


@dataclass(frozen=True)
class Snapshot:
    """Everything a page shows.

    Args:
        url: Of the daemon.
        now: When this was put together, Unix seconds.
        readings: By topic.
        scrapes: Of /metrics, ascending in time, the last ten minutes.
        answered_at: The last answer of any kind, Unix seconds; None: never yet.
        silent_seconds: Since that answer; None: never yet.
        unreachable_since: When answers began to fail; None while they come.
        problem: Why they fail.
    """

    url: str
    now: float
    readings: Mapping[str, Reading] = field(default_factory=dict)
    scrapes: tuple[Scrape, ...] = ()
    answered_at: float | None = None
    silent_seconds: float | None = None
    unreachable_since: float | None = None
    problem: str | None = None

    def reading(self, topic: str) -> Reading:
        """The last answer, empty when there is none yet."""
        return self.readings.get(topic, Reading())

    def get(self, topic: str) -> JSON:
        """The value of a topic; {} when unknown."""
        value = self.reading(topic).value
        return value if isinstance(value, dict) else {}

    def rows(self, topic: str, key: str) -> list[JSON]:
        """A list inside a topic's value; [] when unknown."""
        rows = self.get(topic).get(key)
        return rows if isinstance(rows, list) else []

    @property
    def stale(self) -> bool:
        """Whether what is shown may no longer be so."""
        return self.silent_seconds is None or self.silent_seconds > STALE_SECONDS

    @property
    def state(self) -> str:
        """Of the daemon; `unreachable` when it does not answer."""
        return "unreachable" if self.stale else str(self.get("status").get("state", "unknown"))

    @property
    def revision(self) -> int | None:
        """Of the settings in force."""
        return self.get("status").get("settings_revision")

    @property
    def scopes(self) -> list[str] | None:
        """What the key allows; None: everything."""
        return (self.get("status").get("caller") or {}).get("scopes")

    @property
    def read_only(self) -> str | None:
        """Why nothing can be changed; None when it can."""
        if self.stale:
            return "The daemon does not answer."
        if self.scopes is not None and "admin:write" not in self.scopes:
            return "This key may only look: changes need one with the scope admin:write."
        return None

    def window(self, seconds: float = 300.0) -> Window:
        """The scrapes of the last minutes."""
        return Window(self.scrapes, seconds)


def _metrics(client: Client) -> Scrape:
    return parse(client.metrics(), time.time())


def _history(metric: str, client: Client) -> JSON:
    """Series of a metric in the last hour, and its mean an hour long, a day ago."""
    now = time.time()
    day_ago = now - DAY_SECONDS
    return {
        "hour": client.samples(metric, now - HOUR_SECONDS, step=HISTORY_STEP_SECONDS),
        "day_ago": client.samples(metric, day_ago - HOUR_SECONDS, day_ago, HOUR_SECONDS),
    }


# Gauges as they are; ratios and quantiles as the alert rules record them.
HISTORY_METRICS = (
    "memd_pool_active_ratio",
    "model:memd_prefix_hit:ratio_rate5m",
    "model:memd_time_to_first_token_seconds:p95_rate5m",
    "model:memd_inter_token_latency_seconds:p95_rate5m",
    "memd_generated_tokens_total",
    "model:memd_request_bad:ratio_rate5m",
)
MISSES_METRIC = "memd_prefix_miss_tokens_total"

TOPICS: dict[str, Topic] = {
    "status": Topic(Client.status, 1.0),
    "pool": Topic(Client.pool, 2.0),
    "requests": Topic(Client.requests, 2.0),
    "blocks": Topic(Client.all_blocks, 3.0),
    "pool_maps": Topic(Client.pool_maps, 10.0),
    "settings": Topic(Client.settings, 3.0),
    "settings_history": Topic(lambda client: client.settings_history(measured="true"), 3.0),
    "settings_file": Topic(Client.export_settings, 5.0),
    "settings_diff": Topic(Client.settings_diff, 10.0),
    "prefixes": Topic(lambda client: client.prefixes(limit=500, sort="tokens"), 5.0),
    "metrics": Topic(_metrics, 5.0),
    "gpus": Topic(Client.gpus, 5.0),
    "events": Topic(lambda client: client.events(limit=200), 5.0),
    "alerts": Topic(Client.alerts, 3.0),
    "silences": Topic(Client.silences, 3.0),
    "incidents": Topic(Client.incidents, 10.0),
    "alert_rules": Topic(Client.alert_rules, 10.0),
    "channels": Topic(Client.alert_channels, 10.0),
    "tenants": Topic(Client.tenants, 3.0),
    "jobs": Topic(Client.jobs, 5.0),
    "finished": Topic(lambda client: client.finished_requests(limit=500), 5.0),
    **{
        metric: Topic(partial(_history, metric), 60.0)
        for metric in (*HISTORY_METRICS, MISSES_METRIC)
    },
}
