"""Short forms for building declared metric families at scrape time."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.samples import Sample

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
    family = GaugeMetricFamily(name, FAMILIES[name].help)
    family.samples = _samples(name, samples)
    return family


def counter(name: str, samples: Samples) -> CounterMetricFamily:
    """A counter; its scraped name ends in `_total`."""
    family = CounterMetricFamily(name, FAMILIES[name].help)
    family.samples = _samples(name, samples)
    return family


def histogram(
    name: str, samples: Iterable[tuple[Sequence[str], Counted | None]]
) -> HistogramMetricFamily:
    """A histogram from counts by bucket; None: nothing has been observed yet."""
    declared = FAMILIES[name]
    family = HistogramMetricFamily(name, declared.help)
    bucket, count, total = declared.sample_names
    for values, counted in samples:
        buckets, counts, observed = declared.buckets, [0] * (len(declared.buckets) + 1), 0.0
        if counted is not None:
            buckets, counts, observed = counted.buckets, list(counted.counts), counted.total
        sums = list(accumulate(counts))
        bounds = _bucket_labels(name, tuple(values), tuple(buckets))
        labels = _labels(name, tuple(values))
        family.samples += [
            *(Sample(bucket, bound, below) for bound, below in zip(bounds, sums, strict=True)),
            Sample(count, labels, sums[-1]),
            Sample(total, labels, observed),
        ]
    return family


def _samples(name: str, samples: Samples) -> list[Sample]:
    scraped = FAMILIES[name].scraped_name
    return [Sample(scraped, _labels(name, tuple(values)), value) for values, value in samples]


# Labels are the same in each scrape, and a thousand dicts are most of what one costs. Nobody
# changes them; of labels that come and go, as tenants, the latest are kept.
@lru_cache(4096)
def _labels(name: str, values: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(FAMILIES[name].labels, values, strict=True))


@lru_cache(1024)
def _bucket_labels(
    name: str, values: tuple[str, ...], buckets: tuple[float, ...]
) -> list[dict[str, str]]:
    return [{**_labels(name, values), "le": bound} for bound in (*map(str, buckets), "+Inf")]


def by_label(name: str, values: Mapping[str, float] | None, before: Sequence[str] = ()) -> Samples:
    """One sample for each value of a family's last label; 0 where nothing has been counted yet."""
    *_, fixed = FAMILIES[name].labels.values()
    return [((*before, value), (values or {}).get(value, 0)) for value in fixed]
