"""Short forms for building metric families at scrape time."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

Samples = Iterable[tuple[Sequence[str], float]]  # label values, value


class Counted(Protocol):
    """A histogram: `counts` has one entry a bucket and one for +Inf, not summed."""

    @property
    def buckets(self) -> Sequence[float]:
        """Upper bounds, ascending, without +Inf."""

    @property
    def counts(self) -> Sequence[int]:
        """Observations by bucket."""

    @property
    def sum(self) -> float:
        """Of all observations."""


def gauge(name: str, text: str, labels: Sequence[str], samples: Samples) -> GaugeMetricFamily:
    """A gauge; a sample left out is unknown."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: Sequence[str], samples: Samples) -> CounterMetricFamily:
    """A counter; its name ends in `_total`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def histogram(
    name: str, text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], Counted]]
) -> HistogramMetricFamily:
    """A histogram from counts by bucket."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, counted in samples:
        bounds = [*map(str, counted.buckets), "+Inf"]
        summed = list(zip(bounds, accumulate(counted.counts), strict=True))
        family.add_metric(values, summed, counted.sum)
    return family


def by_label(
    fixed: Sequence[str], values: Mapping[str, float] | None, before: Sequence[str] = ()
) -> Samples:
    """One sample for each fixed label value; 0 where nothing has been counted yet."""
    return [((*before, value), (values or {}).get(value, 0)) for value in fixed]
