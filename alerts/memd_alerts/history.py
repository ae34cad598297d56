"""The samples that rules need, as long as they need them, in memory."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from memd_alerts.rules import Increase, Quantile, Rate, RuleFile

LabelSet = tuple[tuple[str, str], ...]  # sorted by name
_LOOKBACK_SECONDS = 300.0


class Sample(Protocol):
    """One value of one series, as a scrape would show it."""

    @property
    def name(self) -> str:
        """With _total, _bucket and so on."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Names and values."""

    @property
    def value(self) -> float:
        """NaN: not known."""


class Growth(NamedTuple):
    """What a series did over a window, as a counter.

    Args:
        samples: How many of them are in it.
        first_at: Unix seconds.
        first: The value then.
        last_at: Unix seconds.
        grown: From the first to the last; a smaller value than before means that it began anew.
    """

    samples: int
    first_at: float
    first: float
    last_at: float
    grown: float


class Points:
    """The samples of one series, ascending in time, with the sum of what was lost at its resets.

    The sum makes growth over any window a difference of its two ends.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._values: list[float] = []
        self._reset: list[float] = []  # sum of the values at which it began anew, up to here

    def add(self, at: float, value: float) -> None:
        """One more, later than all before."""
        lost = 0.0
        if self._values:
            before = self._values[-1]
            lost = self._reset[-1] + (before if value < before else 0.0)
        self._times.append(at)
        self._values.append(value)
        self._reset.append(lost)

    def forget(self, before: float) -> bool:
        """Drop what is older; whether nothing is left."""
        if self._times and self._times[0] < before:
            stale = bisect_left(self._times, before)
            for column in (self._times, self._values, self._reset):
                del column[:stale]
        return not self._times

    @property
    def last(self) -> tuple[float, float]:
        """Unix seconds and value of the latest."""
        return self._times[-1], self._values[-1]

    def growth(self, start: float, end: float) -> Growth | None:
        """From `start` to `end`, both included; None without a sample."""
        first, last = bisect_left(self._times, start), bisect_right(self._times, end) - 1
        if last < first:
            return None
        grown = self._values[last] - self._values[first] + self._reset[last] - self._reset[first]
        at, value = self._times[first], self._values[first]
        return Growth(last - first + 1, at, value, self._times[last], grown)


class History:
    """Recent samples of the metrics that a rule file names. Not thread-safe.

    Args:
        rules: Decide which metrics are kept, and for how long.
    """

    def __init__(self, rules: RuleFile) -> None:
        self._window_seconds: dict[str, float] = {}
        for selector in rules.selectors():
            name, window = selector.metric, _LOOKBACK_SECONDS
            if isinstance(selector, Rate | Increase | Quantile):
                window = float(selector.over)
            if isinstance(selector, Quantile):
                name += "_bucket"
            self._window_seconds[name] = max(window, self._window_seconds.get(name, 0.0))
        self._series: dict[str, dict[LabelSet, Points]] = {}
        self.last_at: float | None = None

    @property
    def names(self) -> set[str]:
        """The metrics that are kept."""
        return set(self._window_seconds)

    def add(self, now: float, samples: Iterable[Sample]) -> None:
        """Keep one scrape; what the rules do not need, and NaN, is left out.

        Args:
            now: Unix seconds. A clock that was set back empties the history.
            samples: All of one moment.
        """
        if self.last_at is not None and now <= self.last_at:
            self._series.clear()
        self.last_at = now
        for sample in samples:
            if sample.name in self._window_seconds and sample.value == sample.value:
                labels = tuple(sorted(sample.labels.items()))
                series = self._series.setdefault(sample.name, {})
                series.setdefault(labels, Points()).add(now, sample.value)
        for name, series in self._series.items():
            _forget(series, now - self._window_seconds[name])

    def present(self, name: str) -> Iterator[tuple[LabelSet, float]]:
        """The series of a metric that the latest scrape showed."""
        for labels, points in self._series.get(name, {}).items():
            at, value = points.last
            if at == self.last_at:
                yield labels, value

    def growth(self, name: str, now: float, seconds: float) -> Iterator[tuple[LabelSet, Growth]]:
        """The series of a metric with what they did in the last `seconds`."""
        for labels, points in self._series.get(name, {}).items():
            found = points.growth(now - seconds, now)
            if found is not None:
                yield labels, found


def _forget(series: dict[LabelSet, Points], before: float) -> None:
    for labels in [labels for labels, points in series.items() if points.forget(before)]:
        del series[labels]
