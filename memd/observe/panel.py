"""What a panel of the Grafana dashboard is made of; `memd.observe.grafana` draws it."""

from dataclasses import dataclass
from typing import Literal

from memd.observe.expressions import increase, quantile


@dataclass(frozen=True)
class Query:
    """An expression, and the name of its lines; `{{label}}` stands for a label's value."""

    expression: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One picture.

    Args:
        unit: As Grafana names it.
        queries: At least one.
        help: What to read from it.
        warn, bad: Values from which a stat turns orange and red.
        stacked: Areas on top of each other: the upper edge is their sum.
        most: Upper end of the scale.
    """

    title: str
    kind: Literal["stat", "timeseries", "heatmap"]
    unit: str
    queries: tuple[Query, ...]
    help: str
    warn: float | None = None
    bad: float | None = None
    stacked: bool = False
    most: float | None = None


@dataclass(frozen=True)
class Row:
    """Panels under one title, so many beside each other."""

    title: str
    columns: int
    panels: tuple[Panel, ...]


def chart(title: str, unit: str, help: str, *queries: tuple[str, str]) -> Panel:
    """Lines over time."""
    return Panel(title, "timeseries", unit, tuple(Query(*each) for each in queries), help)


def area(title: str, unit: str, help: str, *queries: tuple[str, str]) -> Panel:
    """Areas that add up, over time."""
    lines = tuple(Query(*each) for each in queries)
    return Panel(title, "timeseries", unit, lines, help, stacked=True)


def share(title: str, help: str, *queries: tuple[str, str]) -> Panel:
    """Lines between 0 and 100 %."""
    lines = tuple(Query(*each) for each in queries)
    return Panel(title, "timeseries", "percentunit", lines, help, most=1)


def stat(
    title: str, unit: str, help: str, query: str, legend: str = "", *, warn: float, bad: float
) -> Panel:
    """One number, coloured."""
    return Panel(title, "stat", unit, (Query(query, legend),), help, warn, bad)


def heat(title: str, help: str, family: str) -> Panel:
    """How often values of a histogram occur, over time."""
    query = Query(increase(f"{family}_bucket", by="le"), "{{le}}")
    return Panel(title, "heatmap", "s", (query,), help)


def quantiles(family: str) -> tuple[tuple[str, str], ...]:
    """Median, 95th and 99th percentile of a histogram."""
    return tuple((quantile(each, family), f"p{each * 100:g}") for each in (0.5, 0.95, 0.99))
