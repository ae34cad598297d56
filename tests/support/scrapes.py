"""Samples by hand, and Prometheus's notation of a series over time."""

import re
from typing import NamedTuple


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


_SERIES = re.compile(r"([a-zA-Z_:]+)(?:\{(.*)\})?")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_STEP = re.compile(r"(_|-?[0-9.]+)(?:([+-][0-9.]+))?(?:x([0-9]+))?")


def parse_series(text: str) -> tuple[str, dict[str, str]]:
    """`name{label="value"}`."""
    name, labels = _SERIES.fullmatch(text).groups()
    return name, dict(_LABEL.findall(labels or ""))


def parse_values(text: str) -> list[float | None]:
    """`1+2x3` is 1 3 5 7; `_x3` is three times nothing."""
    values: list[float | None] = []
    for part in text.split():
        start, step, count = _STEP.fullmatch(part).groups()
        if start == "_":
            values += [None] * int(count or 1)
        else:
            values += [float(start) + float(step or 0) * i for i in range(int(count or 0) + 1)]
    return values


def scrape(**series: float) -> list[Sample]:
    """One scrape of metrics without labels."""
    return [Sample(name, {}, value) for name, value in series.items()]
