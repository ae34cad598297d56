"""Short forms for building declared metric families at scrape time."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from memd.observe.registry import FAMILIES

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
    def total(self) -> float:
        """Of all observations."""


def gauge(name: str, samples: Samples) -> GaugeMetricFamily:
    """A gauge; a sample left out is unknown."""
    declared = FAMILIES[name]
    family = GaugeMetricFamily(name, declared.help, labels=tuple(declared.labels))
    for values, value in samples:
        family.add_metric(values, value)
    return family


def counter(name: str, samples: Samples) -> CounterMetricFamily:
    """A counter; its scraped name ends in `_total`."""
    declared = FAMILIES[name]
    family = CounterMetricFamily(name, declared.help, labels=tuple(declared.labels))
    for values, value in samples:
        family.add_metric(values, value)
    return family


def histogram(
    name: str, samples: Iterable[tuple[Sequence[str], Counted | None]]
) -> HistogramMetricFamily:
    """A histogram from counts by bucket; None: nothing has been observed yet."""
    declared = FAMILIES[name]
    family = HistogramMetricFamily(name, declared.help, labels=tuple(declared.labels))
    for values, counted in samples:
        buckets, counts, total = declared.buckets, [0] * (len(declared.buckets) + 1), 0.0
        if counted is not None:
            buckets, counts, total = counted.buckets, list(counted.counts), counted.total
        bounds = [*map(str, buckets), "+Inf"]
        family.add_metric(values, list(zip(bounds, accumulate(counts), strict=True)), total)
    return family


def by_label(name: str, values: Mapping[str, float] | None, before: Sequence[str] = ()) -> Samples:
    """One sample for each value of a family's last label; 0 where nothing has been counted yet."""
    *_, fixed = FAMILIES[name].labels.values()
    return [((*before, value), (values or {}).get(value, 0)) for value in fixed]
