"""The evaluation: rules, samples and what was before give the alerts of now. Pure functions.

Not known is not resolved: without data a firing alert goes on firing, for at most an hour, and a
pending one begins anew.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from memd_alerts.history import History, LabelSet
from memd_alerts.rules import Rule, RuleFile, Unit
from memd_alerts.state import Alert, AlertState, State, label_key
from memd_alerts.values import Outcome, Values

GAP_SECONDS = 300.0  # evidence for a pending alert has no gap longer than this
LOST_SECONDS = 3600.0  # after so long without data a firing alert is given up
RESOLVED_SECONDS = 900.0  # how long a resolved alert is shown, and told to who could not be reached

Kind = Literal["pending", "firing", "resolved", "dropped"]


@dataclass(frozen=True)
class Change:
    """One alert that changed its state; `dropped`: it was pending, and never fired."""

    kind: Kind
    alert: Alert


def evaluate(
    rules: RuleFile, history: History, state: State, now: float, external: Mapping[str, str]
) -> tuple[State, list[Change]]:
    """One evaluation of all rules.

    Args:
        rules: In force.
        history: With the samples of now as its latest.
        state: Of the evaluation before.
        now: Unix seconds.
        external: Labels that every alert gets, such as the instance.

    Returns:
        The new state, and what changed.
    """
    values = Values(rules, history, now)
    before = {(alert.rule, label_key(alert.labels)): alert for alert in state.alerts}
    gap = state.evaluated_at is None or not 0 <= now - state.evaluated_at <= GAP_SECONDS
    steps: list[tuple[Alert | None, Change | None]] = []
    for rule in rules.rules:
        if rule.prometheus_only:
            continue
        for key, outcome in values.outcomes(rule).items():
            labels = _labels(rule, key, external)
            old = before.pop((rule.name, label_key(labels)), None)
            steps.append(_next(rule, labels, old, outcome, now, gap))
    steps += [_without_data(alert, now, gap) for alert in before.values()]
    alerts = [alert for alert, _ in steps if alert is not None]
    alerts.sort(key=lambda each: (each.rule, label_key(each.labels)))
    silences = [each for each in state.silences if each.ends_at > now]
    new = replace(state, evaluated_at=now, alerts=alerts, silences=silences)
    return new, [change for _, change in steps if change is not None]


def _labels(rule: Rule, key: LabelSet, external: Mapping[str, str]) -> dict[str, str]:
    return {"alertname": rule.name, "severity": rule.severity, **external, **dict(key)}


def _next(
    rule: Rule, labels: dict[str, str], old: Alert | None, outcome: Outcome, now: float, gap: bool
) -> tuple[Alert | None, Change | None]:
    """What becomes of one alert whose expression has a value."""
    if old is not None and old.state == "firing":
        if outcome.kept is None:
            return _without_data(old, now, gap)
        seen = _seen(rule, old, outcome, now)
        return (seen, None) if outcome.kept or outcome.met else _ended(seen, now, lost=False)
    if not outcome.met:
        return _without_data(old, now, gap) if old is not None else (None, None)
    if old is None or old.state == "resolved":
        # Who was told that it fires, and not yet that it ended, need not be told again.
        past = old.told if old is not None else {}
        told: dict[str, AlertState] = {c: "firing" for c, s in past.items() if s == "firing"}
        fresh = _fresh(rule, labels, now, told)
        alert = _seen(rule, fresh, outcome, now)
    else:
        alert = _seen(rule, replace(old, since=now) if gap else old, outcome, now)
    if now - alert.since >= rule.hold:
        alert = replace(alert, state="firing", fired_at=now)
        return alert, Change("firing", alert)
    new = old is None or old.state == "resolved"
    return alert, Change("pending", alert) if new else None


def _fresh(rule: Rule, labels: dict[str, str], now: float, told: dict[str, AlertState]) -> Alert:
    """Its id follows from what and when, so that an evaluation has no other input."""
    text = f"{label_key(labels)} {now!r}"
    return Alert(
        id=hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        rule=rule.name,
        labels=labels,
        state="pending",
        summary="",
        value=None,
        threshold=None,
        peak=None,
        since=now,
        known_at=now,
        told=told,
    )


def _without_data(old: Alert, now: float, gap: bool) -> tuple[Alert | None, Change | None]:
    """What becomes of an alert that does not hold, or of which nothing is known."""
    match old.state:
        case "pending":
            return None, Change("dropped", old)
        case "resolved":
            assert old.resolved_at is not None
            return (None if now - old.resolved_at > RESOLVED_SECONDS else old), None
        case "firing":
            kept = replace(old, known_at=now) if gap else old
            if now - kept.known_at > LOST_SECONDS:
                return _ended(kept, now, lost=True)
            return kept, None


def _ended(alert: Alert, now: float, lost: bool) -> tuple[Alert, Change]:
    ended = replace(alert, state="resolved", resolved_at=now, lost=lost)
    return ended, Change("resolved", ended)


def _seen(rule: Rule, alert: Alert, outcome: Outcome, now: float) -> Alert:
    """With the values of now. What ends it is no peak, and the summary tells the worst."""
    value = outcome.value if outcome.value is not None and not math.isnan(outcome.value) else None
    worst = [each for each in (alert.peak, value) if each is not None]
    peak = (max if rule.above is not None else min)(worst) if worst else None
    shown = format_value(value, rule.unit)
    return replace(
        alert,
        value=value,
        threshold=outcome.limit,
        peak=peak,
        known_at=now,
        summary=rule.summary.format_map({**alert.labels, "value": shown}),
    )


def format_value(value: float | None, unit: Unit) -> str:
    """A value for people: 12.5%, 3 s, 1.2 GiB."""
    if value is None:
        return "unknown"
    match unit:
        case "ratio":
            return f"{100 * value:.3g}%"
        case "seconds":
            return f"{value:.3g} s" if value < 120 else f"{value / 60:.3g} min"
        case "bytes":
            return f"{value / 2**30:.3g} GiB"
        case _:
            return f"{value:.4g}"
