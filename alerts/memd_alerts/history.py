"""The samples that rules need, as long as they need them, in memory."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from memd_alerts.rules import Increase, Quantile, Rate, RuleFile

LabelSet = tuple[tuple[str, str], ...]  # sorted by name
Points = deque[tuple[float, float]]  # Unix seconds, value; ascending
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
                series.setdefault(labels, deque()).append((now, sample.value))
        for name, series in self._series.items():
            _forget(series, now - self._window_seconds[name])

    def present(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """The series of a metric that the latest scrape showed."""
        for labels, points in self._series.get(name, {}).items():
            if points[-1][0] == self.last_at:
                yield dict(labels), points[-1][1]

    def window(
        self, name: str, now: float, seconds: float
    ) -> Iterator[tuple[dict[str, str], list[tuple[float, float]]]]:
        """The series of a metric with their points of the last `seconds`."""
        for labels, points in self._series.get(name, {}).items():
            inside = [point for point in points if now - seconds <= point[0] <= now]
            if inside:
                yield dict(labels), inside


def _forget(series: dict[LabelSet, Points], before: float) -> None:
    for labels in list(series):
        points = series[labels]
        while points and points[0][0] < before:
            points.popleft()
        if not points:
            del series[labels]
