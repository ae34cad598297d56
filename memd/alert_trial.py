"""Trying a rule with another limit over the samples of the last days, and keeping those it needs.

The samples are read and evaluated a few hours at a time on a thread, which lets the event loop go
first after each moment.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import groupby
from typing import Any

import msgspec
from memd_alerts.history import Sample as ScrapedSample
from memd_alerts.rules import RuleFile, Scaled
from memd_alerts.trial import KeptSample, Outcome, Trial, kept_selectors
from sqlalchemy import Text, select, type_coerce
from sqlalchemy.orm import Session

from memd.errors import MemdError
from memd.store.store import Store
from memd.store.tables import Sample

REPEAT_SECONDS = 240.0  # a value that stays the same is kept again; trials carry one for 300 s
MAX_FIRINGS = 100  # that are told one by one
_PART_SECONDS = 6 * 3600.0
# Kept with every scrape, so that its times are those of all samples.
_ALWAYS_THERE = "memd_alerts_firing"

Row = tuple[str, dict[str, str], float]


class TrialRunning(MemdError):
    """A trial is under way already."""


class RuleSamples:
    """Picks the samples that only trials of rules need: when they change, or every few minutes.

    Args:
        rules: In force.
        sampled: Metrics that are kept with every scrape.
    """

    def __init__(self, rules: RuleFile, sampled: frozenset[str]) -> None:
        self._wanted: dict[str, list[dict[str, tuple[str, ...]]]] = {}
        for selector in kept_selectors(rules):
            if selector.metric not in sampled:
                self._wanted.setdefault(selector.metric, []).append(selector.where)
        self._kept: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[float, float]] = {}

    def due(self, now: float, samples: Iterable[ScrapedSample]) -> list[Row]:
        """Name, labels and value of those to be kept.

        Args:
            now: Unix seconds.
            samples: Of one scrape.
        """
        rows: list[Row] = []
        for each in samples:
            if each.value != each.value or not self._wants(each):
                continue
            key = each.name, tuple(sorted(each.labels.items()))
            value, at = self._kept.get(key, (None, 0.0))
            if value != each.value or not 0 <= now - at < REPEAT_SECONDS:
                self._kept[key] = each.value, now
                rows.append((each.name, dict(each.labels), each.value))
        return rows

    def _wants(self, sample: ScrapedSample) -> bool:
        return any(
            all(sample.labels.get(name) in values for name, values in where.items())
            for where in self._wanted.get(sample.name, ())
        )


class Trials:
    """Tries rules, one at a time.

    Args:
        store: Holds the samples.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running = False

    async def run(
        self,
        rules: RuleFile,
        name: str,
        threshold: float | None,
        hold_seconds: int | None,
        since: float,
        until: float,
    ) -> dict[str, Any]:
        """What a rule did, and what it would have done.

        Args:
            rules: In force.
            name: Of the rule.
            threshold: The limit to try; None: as it is.
            hold_seconds: Likewise.
            since: Unix seconds.
            until: Likewise.

        Raises:
            KeyError: there is no such rule.
            TrialError: it cannot be tried.
            TrialRunning: another trial is under way.
            StoreError: the samples cannot be read.
        """
        rule = rules.rule(name)
        if rule is None:
            raise KeyError(name)
        trial = Trial(rules, rule, threshold, hold_seconds)
        if self._running:
            raise TrialRunning("another rule is being tried; it takes some seconds")
        self._running = True
        try:
            start = since - trial.warm_up_seconds
            while start < until:
                end = min(start + _PART_SECONDS, until)
                rows = await self._store.query(_samples(trial.names, start, end))
                await asyncio.to_thread(_feed, trial, rows, since)
                start = end
        finally:
            self._running = False
        return {
            "rule": name,
            "since": since,
            "until": until,
            "moments": trial.moments,
            "covered_seconds": round(trial.covered_seconds, 3),
            "unit": rule.unit,
            "direction": "above" if rule.above is not None else "below",
            "as_it_is": _view(trial.as_it_is, until),
            "tried": _view(trial.as_tried, until),
        }


def _samples(
    names: set[str], start: float, end: float
) -> Callable[[Session], list[tuple[float, str, str, float]]]:
    columns = Sample.__table__.c
    query = (
        select(columns.time, columns.metric, type_coerce(columns.labels, Text), columns.value)
        .where(columns.metric.in_(sorted({*names, _ALWAYS_THERE})))
        .where(columns.time >= start, columns.time < end)
        .order_by(columns.time)
    )
    return lambda session: [tuple(row) for row in session.execute(query)]


def _feed(trial: Trial, rows: Sequence[tuple[float, str, str, float]], since: float) -> None:
    for moment, group in groupby(rows, key=lambda row: row[0]):
        samples = [
            KeptSample(name, _labels(labels), value)
            for _, name, labels, value in group
            if name in trial.names
        ]
        trial.feed(moment, samples, evaluated=moment >= since)
        time.sleep(0)  # the event loop waits for the interpreter no longer than one moment takes


@lru_cache(maxsize=4096)
def _labels(text: str) -> dict[str, str]:
    found: dict[str, str] = msgspec.json.decode(text)
    return found


def _view(outcome: Outcome, until: float) -> dict[str, Any]:
    rule, firings = outcome.rule, outcome.firings
    fired = sum((each.resolved_at or until) - each.fired_at for each in firings)
    return {
        "threshold": None if isinstance(rule.limit, Scaled) else rule.limit,
        "clear": None if isinstance(rule.clear, Scaled) else rule.clear,
        "for_seconds": rule.hold,
        "fired": len(firings),
        "firing_seconds": round(fired, 3),
        "pending_only": outcome.dropped,
        "firings": [_firing(each) for each in firings[-MAX_FIRINGS:]],
    }


def _firing(firing: Any) -> dict[str, Any]:
    view = asdict(firing)
    for name in ("peak", "threshold"):
        value = view[name]
        view[name] = value if value is not None and abs(value) < float("inf") else None
    return view
