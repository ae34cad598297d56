"""PromQL over declared families: a name or label that is not declared is an error here.

All expressions are about what the dashboard's variables select: `instance`, and `gpu` and `model`
where a family has them.
"""

from memd.observe.family import Family
from memd.observe.registry import family_of

_SELECTED = ("gpu", "model")  # variables of the dashboard besides `instance`
_OPERATORS = {"": "=", "~": "=~", "!~": "!~"}
_WINDOW = "$__rate_interval"


def series(name: str, **labels: str) -> str:
    """A selector.

    Args:
        name: As scraped, such as `memd_requests_total`.
        labels: A value each; `~a|b` and `!~a|b` are patterns.

    Raises:
        KeyError: the name or a label is not declared, or a label has no such value.
    """
    family = family_of(name)
    if family is None:
        raise KeyError(f"no metric {name}")
    chosen = {"instance": '=~"$instance"'}
    chosen |= {label: f'=~"${label}"' for label in _SELECTED if label in family.labels}
    for label, value in labels.items():
        chosen[label] = _matcher(family, label, value)
    return f"{name}{{{','.join(label + match for label, match in chosen.items())}}}"


def rate(name: str, by: str = "", **labels: str) -> str:
    """How fast a counter grows, a second, summed over what is not in `by`."""
    return _summed(f"rate({series(name, **labels)}[{_WINDOW}])", name, by)


def increase(name: str, by: str = "", **labels: str) -> str:
    """How much a counter grew from one point of the chart to the next."""
    return _summed(f"increase({series(name, **labels)}[{_WINDOW}])", name, by)


def total(name: str, by: str = "", **labels: str) -> str:
    """A gauge, summed over what is not in `by`."""
    return _summed(series(name, **labels), name, by)


def ratio(part: str, whole: str) -> str:
    """One sum over another."""
    return f"{part} / {whole}"


def quantile(share: float, family: str, by: str = "") -> str:
    """A quantile of a histogram's recent observations."""
    bucket = f"{family}_bucket"
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share:g}, {rate(bucket, by=labels)})"


def mean(family: str) -> str:
    """The mean of a histogram's recent observations."""
    return ratio(rate(f"{family}_sum"), rate(f"{family}_count"))


def _summed(expression: str, name: str, by: str) -> str:
    family = family_of(name)
    for label in filter(None, by.split(", ")):
        if family is None or not (label in family.labels or label == "le"):
            raise KeyError(f"{name} has no label {label}")
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def _matcher(family: Family, label: str, value: str) -> str:
    bound = family.labels[label]
    operator = next((each for each in ("!~", "~") if value.startswith(each)), "")
    values = value.removeprefix(operator)
    if isinstance(bound, tuple) and not set(values.split("|")) <= set(bound):
        raise KeyError(f"{family.name} has no {label} {values}")
    return f'{_OPERATORS[operator]}"{values}"'
