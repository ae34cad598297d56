"""What routes and commands look up. Each is a read for `Store.query`, and gives plain data.

Rows come newest first, but samples oldest first; times are Unix seconds, `since` is included and
`until` is not.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import BigInteger, Select, cast, func, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.compiler import SQLCompiler

from memd.store.tables import Sample, TableName, table

MAX_SERIES = 200
MAX_POINTS = 5000
_USUAL_POINTS = 300


def rows_of(
    name: TableName,
    since: float | None = None,
    until: float | None = None,
    limit: int = 100,
    **equal: str | None,
) -> Callable[[Session], tuple[list[dict[str, Any]], bool]]:
    """The newest rows of a table.

    Args:
        name: Of the table.
        since: Not older.
        until: Older.
        limit: Most rows.
        equal: Columns and the value they must have; None: any.

    Returns:
        A read that gives the rows, and whether there are more than `limit`.
    """
    columns = table(name).c
    key = next(iter(table(name).primary_key))
    wanted = [columns[key] == value for key, value in equal.items() if value is not None]
    query = _within(select(table(name)), columns.time, since, until).where(*wanted)
    query = query.order_by(columns.time.desc(), key.desc()).limit(limit + 1)

    def read(session: Session) -> tuple[list[dict[str, Any]], bool]:
        found = [dict(row) for row in session.execute(query).mappings()]
        return found[:limit], len(found) > limit

    return read


def usual_step(since: float, until: float) -> float:
    """A round number of seconds that gives a chart some hundred points."""
    wanted = max(1.0, (until - since) / _USUAL_POINTS)
    steps = (1, 5, 15, 30, 60, 300, 900, 1800, 3600, 10_800, 21_600)
    return float(next((step for step in steps if step >= wanted), 86_400))


def samples_of(
    metric: str, since: float, until: float, step_seconds: float
) -> Callable[[Session], tuple[list[dict[str, Any]], bool]]:
    """The series of a metric, one point for each step in which there are samples.

    Returns:
        A read that gives the series, at most MAX_SERIES, and whether there are more. Each has
        `labels` and, of equal length, `times` (where the step begins), `values` (the mean), `lows`
        and `highs` (the extremes).
    """
    step = _Step(Sample.time, step_seconds).label("step")
    value = Sample.value
    query = (
        select(Sample.labels, step, func.avg(value), func.min(value), func.max(value))
        .where(Sample.metric == metric)
        .group_by(Sample.labels, step)
        .order_by(Sample.labels, step)
    )
    query = _within(query, Sample.__table__.c.time, since, until)

    def read(session: Session) -> tuple[list[dict[str, Any]], bool]:
        series: list[dict[str, Any]] = []
        for labels, number, *numbers in session.execute(query):
            if not series or series[-1]["labels"] != labels:
                if len(series) == MAX_SERIES:
                    return series, True
                series.append(
                    {"labels": labels, "times": [], "values": [], "lows": [], "highs": []}
                )
            figures = (number * step_seconds, *numbers)
            for key, figure in zip(("times", "values", "lows", "highs"), figures, strict=True):
                series[-1][key].append(figure)
        return series, False

    return read


def _within(
    query: Select[Any], time: ColumnElement[float], since: float | None, until: float | None
) -> Select[Any]:
    if since is not None:
        query = query.where(time >= since)
    return query if until is None else query.where(time < until)


class _Step(ColumnElement[int]):
    """Number of the step that a time is in. Casts truncate on SQLite, and round on PostgreSQL."""

    inherit_cache = False
    type = BigInteger()

    def __init__(self, time: Any, step_seconds: float) -> None:
        self.number = time / step_seconds


@compiles(_Step, "sqlite")
def _truncated(element: _Step, compiler: SQLCompiler, **options: Any) -> str:
    return compiler.process(cast(element.number, BigInteger), **options)


@compiles(_Step, "postgresql")
def _floored(element: _Step, compiler: SQLCompiler, **options: Any) -> str:
    return compiler.process(cast(func.floor(element.number), BigInteger), **options)


def summary(session: Session) -> dict[str, Mapping[str, Any]]:
    """Of every table: how many rows, and the times of the oldest and the newest, or null."""
    found: dict[str, Mapping[str, Any]] = {}
    for name in (each.name for each in Sample.metadata.sorted_tables):
        columns = Sample.metadata.tables[name].c
        query = select(func.count(), func.min(columns.time), func.max(columns.time))
        count, oldest, newest = session.execute(query.select_from(columns.time.table)).one()
        found[name] = {"rows": count, "oldest": oldest, "newest": newest}
    return found
