"""Figures from /metrics: totals, increases over a window, quantiles. Pure.

A scrape is read once; what pages ask of it are sums over the samples whose labels match.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Scrape:
    """One reading of /metrics.

    Args:
        at: Unix seconds.
        samples: By name, labels and value.
    """

    at: float
    samples: dict[str, list[tuple[dict[str, str], float]]]

    def total(self, name: str, **labels: str) -> float | None:
        """Sum of the samples that carry these labels; None when there is none."""
        found = [
            value
            for given, value in self.samples.get(name, ())
            if labels.items() <= given.items() and not math.isnan(value)
        ]
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums of a name by the values of one label."""
        sums: dict[str, float] = {}
        for given, value in self.samples.get(name, ()):
            if label in given:
                sums[given[label]] = sums.get(given[label], 0.0) + value
        return sums


def parse(text: str, at: float) -> Scrape:
    """Read Prometheus's text format; memd's samples only."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("memd_"):
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return Scrape(at, samples)


class Window:
    """Scrapes of the last minutes, oldest first, and what changed in them.

    Args:
        scrapes: Ascending in time.
        seconds: How far back to look from the newest.
    """

    def __init__(self, scrapes: Sequence[Scrape], seconds: float = 300.0) -> None:
        newest = scrapes[-1].at if scrapes else 0.0
        self.scrapes = [scrape for scrape in scrapes if scrape.at >= newest - seconds]

    @property
    def seconds(self) -> float:
        """Between the first and the last scrape."""
        return self.scrapes[-1].at - self.scrapes[0].at if self.scrapes else 0.0

    def last(self, name: str, **labels: str) -> float | None:
        """The newest total of a gauge."""
        return self.scrapes[-1].total(name, **labels) if self.scrapes else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """The newest values of a name by one label."""
        return self.scrapes[-1].by(name, label) if self.scrapes else {}

    def increase(self, name: str, **labels: str) -> float | None:
        """How much a counter grew; a fall is a restart, after which it counts from 0."""
        if len(self.scrapes) < 2:
            return None
        totals = [scrape.total(name, **labels) for scrape in self.scrapes]
        known = [total for total in totals if total is not None]
        if len(known) < 2:
            return None
        return sum(
            after - before if after >= before else after for before, after in pairwise(known)
        )

    def rate(self, name: str, **labels: str) -> float | None:
        """A counter's growth per second."""
        grown = self.increase(name, **labels)
        return grown / self.seconds if grown is not None and self.seconds > 0 else None

    def ratio(self, part: str, whole: str) -> float | None:
        """Growth of one counter over that of another; None when the other did not grow."""
        top, bottom = self.increase(part), self.increase(whole)
        return top / bottom if top is not None and bottom else None

    def quantile(self, q: float, name: str, **labels: str) -> float | None:
        """Of a histogram's observations in the window; None when there were none.

        Source:
            Linear interpolation inside the bucket, as Prometheus's histogram_quantile does.
        """
        bounds = {given["le"] for given, _ in self._buckets(name)}
        grown = [
            (float(bound), self.increase(f"{name}_bucket", le=bound, **labels) or 0.0)
            for bound in bounds
        ]
        return quantile_of(q, sorted(grown))

    def _buckets(self, name: str) -> Sequence[tuple[dict[str, str], float]]:
        return self.scrapes[-1].samples.get(f"{name}_bucket", ()) if self.scrapes else ()


def quantile_of(q: float, cumulative: Sequence[tuple[float, float]]) -> float | None:
    """The q-quantile of (upper bound, observations up to it), ascending; None without any."""
    if not cumulative or cumulative[-1][1] <= 0:
        return None
    rank = q * cumulative[-1][1]
    below, start = 0.0, 0.0
    for bound, seen in cumulative:
        if seen >= rank:
            if math.isinf(bound):
                return start
            inside = seen - below
            return start + (bound - start) * ((rank - below) / inside if inside else 1.0)
        below, start = seen, bound
    return start
