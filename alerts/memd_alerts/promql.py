"""The rule file as Prometheus's: recording rules, alerting rules, and their expressions.

A firing alert lasts until its clear level, as in the built-in evaluation: the rule asks for its own
state in the series ALERTS. What differs there is in docs/alerts.md.
"""

import json
from collections.abc import Sequence
from typing import Any

import yaml

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
    Rule,
    RuleFile,
    Scaled,
    Selector,
    Value,
)

INSTANCE = "instance"  # every aggregation keeps it: one Prometheus watches many daemons
_HEADER = """\
# Written by `memd alerts render` from the rules that memd evaluates itself; a test keeps it true.
"""
_SHOWN = {
    "number": "{{ $value | humanize }}",
    "per_second": "{{ $value | humanize }}",
    "ratio": "{{ $value | humanizePercentage }}",
    "seconds": "{{ $value | humanizeDuration }}",
    "bytes": "{{ $value | humanize1024 }}B",
}


def render(rules: RuleFile, runbooks: str, interval_seconds: int = 15) -> str:
    """A rule file for Prometheus.

    Args:
        rules: The source.
        runbooks: Where the runbook pages are, without the final slash.
        interval_seconds: How often Prometheus is to evaluate it.
    """
    groups: list[dict[str, Any]] = [
        {
            "name": "memd.recording",
            "interval": duration(interval_seconds),
            "rules": [
                {"record": each.name, "expr": measured(each.expression, each.by, rules)}
                for each in rules.records
            ],
        }
    ]
    for group in dict.fromkeys(rule.group for rule in rules.rules):
        members = [rule for rule in rules.rules if rule.group == group]
        groups.append(
            {
                "name": f"memd.{group}",
                "interval": duration(interval_seconds),
                "rules": [_alert(rule, rules, runbooks) for rule in members],
            }
        )
    text = yaml.safe_dump({"groups": groups}, sort_keys=False, width=1000, allow_unicode=True)
    return _HEADER + text


def _alert(rule: Rule, rules: RuleFile, runbooks: str) -> dict[str, Any]:
    alert: dict[str, Any] = {"alert": rule.name, "expr": promql(rule, rules)}
    if rule.hold:
        alert["for"] = duration(rule.hold)
    alert["labels"] = {"severity": rule.severity}
    summary = rule.summary.replace("{value}", _SHOWN[rule.unit])
    for name in rule.by:
        summary = summary.replace(f"{{{name}}}", f"{{{{ $labels.{name} }}}}")
    alert["annotations"] = {
        "summary": summary,
        "runbook_url": f"{runbooks}/{rule.name}.md",
    }
    return alert


def promql(rule: Rule, rules: RuleFile) -> str:
    """The expression of an alert, with its guards and its clear level."""
    if rule.absent:
        return f"absent({_series(rule.expression)})"
    raised = _guarded(rule, rule, rules)
    if rule.clear is None:
        return raised
    kept = _guarded(rule.ending, rule, rules)
    labels = ", ".join((INSTANCE, *rule.by))
    own = f'ALERTS{{alertname="{rule.name}", alertstate="firing"}}'
    return f"({raised}) or (({kept}) and on ({labels}) {own})"


def _guarded(condition: Condition, rule: Rule, rules: RuleFile) -> str:
    text = _condition(condition, rule.by, rules)
    for guard in rule.guards:
        labels = _labels(guard.expression, rule.by, rules)
        shared = ", ".join((INSTANCE, *(name for name in rule.by if name in labels)))
        text = f"({text}) and on ({shared}) ({_condition(guard, rule.by, rules)})"
    return text


def _condition(condition: Condition, by: Sequence[str], rules: RuleFile) -> str:
    left = measured(condition.expression, by, rules)
    sign = ">" if condition.above is not None else "<"
    limit = condition.limit
    if isinstance(limit, Scaled):
        mine = _labels(condition.expression, by, rules)
        others = _labels(limit.of, by, rules)
        return f"{left} {sign}{_matching(mine, others)} {_scaled(limit, by, rules)}"
    return f"{left} {sign} {_number(limit)}"


def _scaled(limit: Limit, by: Sequence[str], rules: RuleFile) -> str:
    assert isinstance(limit, Scaled)
    text = measured(limit.of, by, rules)
    return text if limit.times == 1 else f"({_number(limit.times)} * {text})"


def measured(expression: Expression, by: Sequence[str], rules: RuleFile) -> str:
    """The expression of what a rule compares with its limit, by these labels and the instance."""
    match expression:
        case Record():
            return expression.name
        case Ratio():
            mine, others = (_labels(each, by, rules) for each in (expression.of, expression.to))
            above = measured(expression.of, by, rules)
            below = measured(expression.to, by, rules)
            return f"({above} /{_matching(mine, others)} {below})"
        case _:
            return _aggregated(expression, by if expression.by is None else expression.by)


def _aggregated(selector: Selector, by: Sequence[str]) -> str:
    labels, series = ", ".join((INSTANCE, *by)), _series(selector)
    match selector:
        case Value():
            return f"sum by ({labels}) ({series})"
        case Largest():
            return f"max by ({labels}) ({series})"
        case Age():
            return f"(time() - max by ({labels}) ({series}))"
        case Increase() | Rate():
            grown = f"{selector.form}({series}[{duration(selector.over)}])"
            return f"sum by ({labels}) ({grown})"
        case Quantile():
            grown = f"rate({series}[{duration(selector.over)}])"
            return f"histogram_quantile({selector.q:g}, sum by ({labels}, le) ({grown}))"


def _series(expression: Expression) -> str:
    assert not isinstance(expression, Ratio | Record)
    name = expression.metric + ("_bucket" if isinstance(expression, Quantile) else "")
    matchers = []
    for label, values in expression.where.items():
        sign = "=" if len(values) == 1 else "=~"
        matchers.append(f"{label}{sign}{json.dumps('|'.join(values))}")
    return f"{name}{{{','.join(matchers)}}}" if matchers else name


def _labels(expression: Expression, by: Sequence[str], rules: RuleFile) -> set[str]:
    """The labels an expression has, beside the instance."""
    match expression:
        case Record():
            return set(rules.record(expression.name).by)
        case Ratio():
            return _labels(expression.of, by, rules)
        case _:
            return set(by if expression.by is None else expression.by)


def _matching(mine: set[str], others: set[str]) -> str:
    if mine == others:
        return ""
    return f" on ({', '.join((INSTANCE, *sorted(mine & others)))}) group_left ()"


def duration(seconds: int) -> str:
    """As Prometheus writes it: 90s, 5m, 1d."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds and seconds % length == 0:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def _number(value: float) -> str:
    return f"{value:g}" if value != int(value) else str(int(value))
