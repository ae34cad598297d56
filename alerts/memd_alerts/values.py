"""What an expression of the rule file is worth now: PromQL's answers from samples in memory.

Rates are extrapolated to the ends of their window as Prometheus does it, so that both evaluations
agree (https://prometheus.io/docs/prometheus/latest/querying/functions/#rate). A series that nobody
reported is left out; a ratio of nothing to nothing is NaN, which no limit is exceeded by.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from memd_alerts.history import Growth, History, LabelSet
from memd_alerts.rules import (
    Age,
    Condition,
    Expression,
    Increase,
    Largest,
    Limit,
    Quantile,
    Rate,
    Ratio,
    Record,
    Recording,
    Rule,
    RuleFile,
    Scaled,
    Selector,
    Value,
)

Vector = dict[LabelSet, float]
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Outcome:
    """What a rule's condition says about one label set; None: a part of it is not known.

    Args:
        value: Of the expression; NaN: there was nothing to divide by.
        limit: It was compared with.
        met: The condition with its guards.
        kept: The same at the level where a firing alert ends.
    """

    value: float | None
    limit: float | None
    met: bool | None
    kept: bool | None


class Values:
    """Computes expressions at one moment.

    Args:
        rules: Hold the records.
        history: Where samples come from.
        now: Unix seconds.
    """

    def __init__(self, rules: RuleFile, history: History, now: float) -> None:
        self._rules = rules
        self._history = history
        self._now = now
        # By identity: rules share records, and expressions are never changed.
        self._vectors: dict[tuple[int, tuple[str, ...]], Vector] = {}

    def outcomes(self, rule: Rule) -> dict[LabelSet, Outcome]:
        """The rule's condition for each label set that has a value."""
        values = self.vector(rule.expression, rule.by)
        met, limits = self._compare(rule, values, rule.by)
        kept, _ = self._compare(rule.ending, values, rule.by)
        for guard in rule.guards:
            if all(state is False for state in (*met.values(), *kept.values())):
                break
            holds = self._guard(guard, rule.by)
            met = {key: _both(state, _joined(holds, key)) for key, state in met.items()}
            kept = {key: _both(state, _joined(holds, key)) for key, state in kept.items()}
        return {
            key: Outcome(value, limits[key], met[key], kept[key]) for key, value in values.items()
        }

    def recorded(self, recording: Recording) -> Vector:
        """A record's values."""
        return self.vector(recording.expression, recording.by)

    def vector(self, expression: Expression, by: tuple[str, ...]) -> Vector:
        """An expression's value by label set.

        Args:
            expression: What to compute.
            by: The labels kept where it does not say itself.
        """
        key = id(expression), by
        if key not in self._vectors:
            self._vectors[key] = self._computed(expression, by)
        return self._vectors[key]

    def _computed(self, expression: Expression, by: tuple[str, ...]) -> Vector:
        match expression:
            case Record():
                return self.recorded(self._rules.record(expression.name))
            case Ratio():
                above = self.vector(expression.of, by)
                below = self.vector(expression.to, by)
                pairs = ((key, value, _joined(below, key)) for key, value in above.items())
                return {key: _divided(value, to) for key, value, to in pairs if to is not None}
            case _:
                return self._selected(expression, by if expression.by is None else expression.by)

    def _selected(self, selector: Selector, by: tuple[str, ...]) -> Vector:
        match selector:
            case Value():
                return _summed(self._present(selector), by)
            case Largest():
                return _largest(self._present(selector), by)
            case Age():
                latest = _largest(self._present(selector), by)
                return {key: self._now - value for key, value in latest.items()}
            case Increase():
                return _summed(self._grown(selector.metric, selector, selector.over), by)
            case Rate():
                grown = _summed(self._grown(selector.metric, selector, selector.over), by)
                return {key: value / selector.over for key, value in grown.items()}
            case Quantile():
                buckets = self._grown(f"{selector.metric}_bucket", selector, selector.over)
                summed = _summed(buckets, ("le", *by))
                return _quantiles(selector.q, summed)

    def _present(self, selector: Selector) -> Iterator[tuple[LabelSet, float]]:
        for labels, value in self._history.present(selector.metric):
            if _wanted(selector, labels):
                yield labels, value

    def _grown(
        self, name: str, selector: Selector, seconds: float
    ) -> Iterator[tuple[LabelSet, float]]:
        for labels, growth in self._history.growth(name, self._now, seconds):
            if _wanted(selector, labels) and growth.samples > 1:
                yield labels, _increase(growth, self._now, seconds)

    def _compare(
        self, condition: Condition, values: Vector, by: tuple[str, ...]
    ) -> tuple[dict[LabelSet, bool | None], dict[LabelSet, float | None]]:
        limits = {key: self._limit(condition.limit, key, by) for key in values}
        states: dict[LabelSet, bool | None] = {}
        for key, value in values.items():
            limit = limits[key]
            if limit is None:
                states[key] = None
            else:
                states[key] = value > limit if condition.above is not None else value < limit
        return states, limits

    def _limit(self, limit: Limit, key: LabelSet, by: tuple[str, ...]) -> float | None:
        if not isinstance(limit, Scaled):
            return limit
        value = _joined(self.vector(limit.of, by), key)
        return None if value is None else value * limit.times

    def _guard(self, guard: Condition, by: tuple[str, ...]) -> dict[LabelSet, bool | None]:
        values = self.vector(guard.expression, by)
        return self._compare(guard, values, by)[0]


def _wanted(selector: Selector, labels: LabelSet) -> bool:
    if not selector.where:
        return True
    given = dict(labels)
    return all(given.get(name) in values for name, values in selector.where.items())


@lru_cache(maxsize=4096)
def _key(labels: LabelSet, by: tuple[str, ...]) -> LabelSet:
    """Those of the labels that are kept."""
    return tuple(pair for pair in labels if pair[0] in by)


def _summed(series: Iterator[tuple[LabelSet, float]], by: tuple[str, ...]) -> Vector:
    sums: dict[LabelSet, float] = defaultdict(float)
    for labels, value in series:
        sums[_key(labels, by)] += value
    return dict(sums)


def _largest(series: Iterator[tuple[LabelSet, float]], by: tuple[str, ...]) -> Vector:
    found: Vector = {}
    for labels, value in series:
        key = _key(labels, by)
        found[key] = max(value, found.get(key, -math.inf))
    return found


def _joined(vector: Mapping[LabelSet, Entry], key: LabelSet) -> Entry | None:
    """The entry that has no label other than `key` has it, too."""
    if key in vector:
        return vector[key]
    labels = set(key)
    return next((value for other, value in vector.items() if labels.issuperset(other)), None)


def _both(one: bool | None, other: bool | None) -> bool | None:
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


def _divided(value: float, by: float) -> float:
    if by == 0:
        return math.nan if value == 0 else math.copysign(math.inf, value)
    return value / by


def _increase(growth: Growth, now: float, seconds: float) -> float:
    """Of a counter over the whole window, from what it did between its samples."""
    grown, sampled = growth.grown, growth.last_at - growth.first_at
    spacing = sampled / (growth.samples - 1)
    at_start, at_end = growth.first_at - (now - seconds), now - growth.last_at
    if grown > 0 and growth.first >= 0:
        at_start = min(at_start, sampled * growth.first / grown)  # no counter was below 0
    covered = sampled
    covered += at_start if at_start < 1.1 * spacing else spacing / 2
    covered += at_end if at_end < 1.1 * spacing else spacing / 2
    return grown * covered / sampled


def _quantiles(q: float, buckets: Vector) -> Vector:
    by_rest: dict[LabelSet, list[tuple[float, float]]] = defaultdict(list)
    for labels, count in buckets.items():
        bound = float(dict(labels)["le"])
        by_rest[tuple(pair for pair in labels if pair[0] != "le")].append((bound, count))
    return {key: _quantile(q, sorted(counts)) for key, counts in by_rest.items()}


def _quantile(q: float, buckets: Sequence[tuple[float, float]]) -> float:
    """Linear inside a bucket, as histogram_quantile() does it; NaN without observations."""
    total = buckets[-1][1]
    if total <= 0 or len(buckets) < 2:
        return math.nan
    rank, lower, before = q * total, 0.0, 0.0
    for bound, count in buckets[:-1]:
        if count >= rank:
            return lower + (bound - lower) * (rank - before) / (count - before)
        lower, before = bound, count
    return buckets[-2][0]
