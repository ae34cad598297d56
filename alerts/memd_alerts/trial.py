"""What a rule would have done: the same evaluation, run over samples that were kept. Pure.

Kept are the values of records, and the metrics that rules look at themselves; of histograms nothing
is. So a record stands for its series here, and is not computed anew.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memd_alerts.evaluate import GAP_SECONDS, Change, evaluate
from memd_alerts.history import History, LabelSet
from memd_alerts.rules import (
    Condition,
    Expression,
    Limit,
    Quantile,
    Ratio,
    Record,
    Rule,
    RuleFile,
    Scaled,
    Selector,
    Value,
)
from memd_alerts.state import State

# A metric that does not change need not be kept more often; Prometheus looks back as far.
LOOKBACK_SECONDS = 300.0
_NAMES = ("MemdRuleAsItIs", "MemdRuleAsTried")  # rules of one file have names of their own


class TrialError(Exception):
    """A rule cannot be tried; the message says why."""


class KeptSample(NamedTuple):
    """A value of one series at one moment."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass
class Firing:
    """One life of an alert.

    Args:
        labels: Those that tell it from others of the rule.
        since: Unix seconds; when its condition began to hold.
        fired_at: When it had held long enough.
        resolved_at: When it ended; None: it did not until the end of the trial.
        peak: The worst value, None where there was nothing to divide by.
        threshold: What it was compared with.
    """

    labels: dict[str, str]
    since: float
    fired_at: float
    resolved_at: float | None = None
    peak: float | None = None
    threshold: float | None = None


@dataclass
class Outcome:
    """What one form of the rule did.

    Args:
        rule: The form, with its records replaced.
        firings: In the order in which they began.
        dropped: How often it was pending and did not last.
    """

    rule: Rule
    firings: list[Firing] = field(default_factory=list)
    dropped: int = 0


def changed(rule: Rule, threshold: float | None, hold_seconds: int | None) -> Rule:
    """A rule with another limit or hold time; None leaves it as it is.

    The level at which it ends moves along: it keeps its proportion to the limit.
    """
    update: dict[str, object] = {}
    if threshold is not None:
        above = rule.above is not None
        update["above" if above else "below"] = threshold
        update["clear"] = _moved_clear(rule, threshold)
    if hold_seconds is not None:
        update["hold"] = hold_seconds
    return rule.model_copy(update=update)


def _moved_clear(rule: Rule, threshold: float) -> float | None:
    limit, clear = rule.limit, rule.clear
    before = limit.times if isinstance(limit, Scaled) else limit
    after = clear.times if isinstance(clear, Scaled) else clear
    if after is None or not before or isinstance(limit, Scaled) != isinstance(clear, Scaled):
        return None
    moved = threshold * after / before
    return min(moved, threshold) if rule.above is not None else max(moved, threshold)


def kept_selectors(rules: RuleFile) -> list[Selector]:
    """What of the samples has to be kept for trials, besides the records."""
    records = {record.name for record in rules.records}
    return [
        each
        for rule in rules.rules
        if not rule.prometheus_only
        for each in _selectors_of(_over_records(rule, rules))
        if not isinstance(each, Quantile) and each.metric not in records
    ]


class Trial:
    """One rule, as it is and as changed, over the samples of some days.

    Feed it moments in order: first those before the days in question, so that rates are known.

    Args:
        rules: The file the rule is of.
        rule: As it is.
        threshold: The limit to try; None: as it is.
        hold_seconds: Likewise.

    Raises:
        TrialError: only Prometheus evaluates the rule, or it looks at what is not kept.
    """

    def __init__(
        self,
        rules: RuleFile,
        rule: Rule,
        threshold: float | None = None,
        hold_seconds: int | None = None,
    ) -> None:
        if rule.prometheus_only:
            raise TrialError(f"{rule.name} can be evaluated by Prometheus only")
        as_it_is = _over_records(rule, rules)
        # Both share their expressions, which are then computed once.
        forms = [as_it_is, changed(as_it_is, threshold, hold_seconds)]
        selectors = [each for form in forms for each in _selectors_of(form)]
        unkept = sorted({each.metric for each in selectors if isinstance(each, Quantile)})
        if unkept:
            raise TrialError(
                f"{rule.name} looks at the histogram {unkept[0]}, of which no samples are kept; "
                "a record of its quantile would be"
            )
        self._file = RuleFile(
            rules=tuple(
                form.model_copy(update={"name": name})
                for form, name in zip(forms, _NAMES, strict=True)
            )
        )
        self._by = set(rule.by)
        self._history = _KeptHistory(self._file, {record.name for record in rules.records})
        self._state = State()
        self._open: dict[str, Firing] = {}  # by the alert's id
        self._latest: dict[tuple[str, LabelSet], tuple[float, KeptSample]] = {}
        self.outcomes = dict(zip(_NAMES, map(Outcome, forms), strict=True))
        self.covered_seconds = 0.0
        self.moments = 0

    @property
    def names(self) -> set[str]:
        """The metrics whose samples it wants, records among them."""
        return self._history.names

    @property
    def warm_up_seconds(self) -> float:
        """How far before the first moment samples matter."""
        return max(self._history.window_seconds)

    @property
    def as_it_is(self) -> Outcome:
        """What the rule did, as far as the samples tell."""
        return self.outcomes[_NAMES[0]]

    @property
    def as_tried(self) -> Outcome:
        """What the changed rule would have done."""
        return self.outcomes[_NAMES[1]]

    def feed(self, now: float, samples: Iterable[KeptSample], evaluated: bool = True) -> None:
        """Go on to the next moment.

        Args:
            now: Unix seconds, later than those before.
            samples: Of this moment.
            evaluated: Off for what is only there so that rates are known.
        """
        for sample in samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            self._latest[key] = now, sample
        self._latest = {
            key: entry
            for key, entry in self._latest.items()
            if now - entry[0] <= (0.0 if key[0] in self._history.records else LOOKBACK_SECONDS)
        }
        self._history.add(now, (sample for _, sample in self._latest.values()))
        if not evaluated:
            return
        if self._state.evaluated_at is not None:
            since = now - self._state.evaluated_at
            self.covered_seconds += since if since <= GAP_SECONDS else 0.0
        self.moments += 1
        self._state, changes = evaluate(self._file, self._history, self._state, now, {})
        for change in changes:
            self._note(change)
        for alert in self._state.alerts:
            if alert.id in self._open:
                self._open[alert.id].peak = alert.peak

    def _note(self, change: Change) -> None:
        alert, outcome = change.alert, self.outcomes[change.alert.rule]
        match change.kind:
            case "firing":
                assert alert.fired_at is not None
                labels = {name: alert.labels[name] for name in self._by & alert.labels.keys()}
                firing = Firing(labels, alert.since, alert.fired_at, None, alert.peak)
                firing.threshold = alert.threshold
                outcome.firings.append(firing)
                self._open[alert.id] = firing
            case "resolved":
                firing = self._open.pop(alert.id)
                firing.resolved_at, firing.peak = alert.resolved_at, alert.peak
            case "dropped":
                outcome.dropped += 1


class _KeptHistory(History):
    """Samples as they were kept: a record without one had no value, which is not unknown."""

    def __init__(self, rules: RuleFile, records: set[str]) -> None:
        super().__init__(rules)
        self.records = records & self.names
        self._seen: dict[str, set[LabelSet]] = {name: set() for name in self.records}

    @property
    def window_seconds(self) -> list[float]:
        """How far back each metric is looked at."""
        return list(self._window_seconds.values())

    def present(self, name: str) -> Iterator[tuple[LabelSet, float]]:
        """The series of the latest moment; NaN for those of a record that are not there."""
        found = list(super().present(name))
        yield from found
        if name in self._seen:
            there = {labels for labels, _ in found}
            yield from ((labels, math.nan) for labels in self._seen[name] - there)
            self._seen[name] |= there


def _over_records(rule: Rule, rules: RuleFile) -> Rule:
    """The rule with its records replaced by the series that are kept of them."""

    def expression(given: Expression) -> Expression:
        match given:
            case Record():
                by = rules.record(given.name).by
                return Value(form="value", metric=given.name, by=by)
            case Ratio():
                return given.model_copy(
                    update={"of": expression(given.of), "to": expression(given.to)}
                )
            case _:
                return given

    def limit(given: Limit | None) -> Limit | None:
        if not isinstance(given, Scaled):
            return given
        return given.model_copy(update={"of": expression(given.of)})

    def parts(given: Condition) -> dict[str, object]:
        return {
            "expression": expression(given.expression),
            "above": limit(given.above),
            "below": limit(given.below),
        }

    guards = tuple(guard.model_copy(update=parts(guard)) for guard in rule.guards)
    return rule.model_copy(update={**parts(rule), "clear": limit(rule.clear), "guards": guards})


def _selectors_of(rule: Rule) -> Sequence[Selector]:
    return list(RuleFile(rules=(rule,)).selectors())
