"""The rule file that is to be used, checked against the metrics that memd has.

A rule over a metric or label that does not exist would never fire, and nobody would know.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from memd_alerts.rules import (
    RULES_FILE,
    Condition,
    Expression,
    Increase,
    Quantile,
    Rate,
    Ratio,
    Record,
    RuleFile,
    RulesError,
    Scaled,
    Selector,
    load_rules,
)

from memd.observe.family import Bound, Family
from memd.observe.registry import FAMILIES, family_of

# What Python's client says of the process; it has no labels.
_OF_THE_PROCESS = ("process_", "python_")


def read_rules(path: Path | None) -> RuleFile:
    """The rules of a file, or memd's own.

    Args:
        path: None: memd's own.

    Raises:
        RulesError: it cannot be read, or names what there is not; the message names the rule.
    """
    path = path or RULES_FILE
    rules = load_rules(path)
    for name, fault in _faults(rules):
        raise RulesError(f"{path}: {name}: {fault}")
    return rules


def matcher_fault(rules: RuleFile, matchers: Mapping[str, str]) -> str | None:
    """Why a silence could never cover an alert; None: it could.

    Args:
        rules: In force.
        matchers: Label to value or pattern, as silences have them.
    """
    labels = {label for rule in rules.rules for label in rule.by}
    labels |= {"alertname", "severity", "instance"}
    if unknown := sorted(matchers.keys() - labels):
        return f"no alert has a label {unknown[0][:100]!r}; there are {_list(labels)}"
    mine = [rule for rule in rules.rules if fnmatchcase(rule.name, matchers.get("alertname", "*"))]
    if not mine:
        return f"no rule is named {matchers['alertname'][:100]!r}"
    severity = matchers.get("severity", "*")
    if not any(fnmatchcase(rule.severity, severity) for rule in mine):
        there = {rule.severity for rule in mine}
        return f"severity is never {severity[:100]!r} of these alerts, but {_list(there)}"
    return None


def _faults(rules: RuleFile) -> Iterator[tuple[str, str]]:
    """The rule or record, and what is wrong with it."""
    for record in rules.records:
        yield from ((record.name, each) for each in _of_expression(record.expression))
        yield from ((record.name, each) for each in _kept(record.expression, record.by, rules))
    for rule in rules.rules:
        if rule.prometheus_only:
            continue
        for condition in (rule, *rule.guards):
            yield from ((rule.name, each) for each in _of_condition(condition))
        if isinstance(rule.clear, Scaled):
            yield from ((rule.name, each) for each in _of_expression(rule.clear.of))
        yield from ((rule.name, each) for each in _kept(rule.expression, rule.by, rules))


def _of_condition(condition: Condition) -> Iterator[str]:
    yield from _of_expression(condition.expression)
    if isinstance(condition.limit, Scaled):
        yield from _of_expression(condition.limit.of)


def _of_expression(expression: Expression) -> Iterator[str]:
    match expression:
        case Ratio():
            yield from _of_expression(expression.of)
            yield from _of_expression(expression.to)
        case Record():
            return  # that there is one is checked by the file itself
        case _:
            yield from _of_selector(expression)


def _of_selector(selector: Selector) -> Iterator[str]:
    metric, labels = selector.metric, _labels(selector)
    family = _family(selector)
    if family is None and not metric.startswith(_OF_THE_PROCESS):
        what = "histogram" if isinstance(selector, Quantile) else "metric"
        yield f"there is no {what} {metric}{_meant(selector)}"
        return
    if family is not None and isinstance(selector, Rate | Increase) and family.kind == "gauge":
        yield f"{metric} is a gauge: only what counts up has a {selector.form}"
    for label in dict.fromkeys((*selector.where, *(selector.by or ()))):
        if label not in labels:
            yield f"{metric} has no label {label}, but {_list(labels)}"
    for label, values in selector.where.items():
        known = labels.get(label, "")
        if not isinstance(known, str) and (unknown := set(values) - set(known)):
            yield f"{metric}: {label} is never {_list(unknown)}, but {_list(known)}"


def _kept(expression: Expression, by: Collection[str], rules: RuleFile) -> Iterator[str]:
    """Labels that alerts are to be told apart by, and that the expression does not have."""
    match expression:
        case Ratio():
            yield from _kept(expression.of, by, rules)
            return
        case Record():
            name, there = expression.name, list(rules.record(expression.name).by)
        case _:
            name = expression.metric
            there = list(_labels(expression) if expression.by is None else expression.by)
    for label in by:
        if label not in there:
            yield f"by {label}: {name} has no such label, but {_list(there)}"


def _family(selector: Selector) -> Family | None:
    if isinstance(selector, Quantile):
        found = FAMILIES.get(selector.metric)
        return found if found is not None and found.kind == "histogram" else None
    return family_of(selector.metric)


def _labels(selector: Selector) -> Mapping[str, Bound]:
    family = _family(selector)
    return {} if family is None else family.labels


def _meant(selector: Selector) -> str:
    """What there is of a name that is nearly right; "": nothing."""
    family = FAMILIES.get(selector.metric) or family_of(selector.metric)
    if family is None:
        return ""
    whole = isinstance(selector, Quantile) and family.kind == "histogram"
    return f"; there is {_list([family.name] if whole else family.sample_names)}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
