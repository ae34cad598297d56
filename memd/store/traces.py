"""Reads of recorded traces, and how much of them is too much."""

import math
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Select, func, select, tuple_
from sqlalchemy.orm import Session

from memd.store.tables import RecordedTrace, TraceSequence

ROW_BYTES = 160  # of a sequence beside its digests, indexes included
_SIZE = func.length(TraceSequence.pages) + ROW_BYTES


def list_traces(limit: int) -> Callable[[Session], list[dict[str, Any]]]:
    """A read of the newest recordings, with the number and size of the sequences that are kept."""

    def read(session: Session) -> list[dict[str, Any]]:
        columns = RecordedTrace.__table__.c
        query = select(RecordedTrace.__table__).order_by(columns.time.desc()).limit(limit)
        rows = [dict(row) for row in session.execute(query).mappings()]
        kept = (
            select(TraceSequence.trace_id, func.count(), func.sum(_SIZE))
            .where(TraceSequence.trace_id.in_([row["id"] for row in rows]))
            .group_by(TraceSequence.trace_id)
        )
        found = {name: (count, int(size)) for name, count, size in session.execute(kept)}
        for row in rows:
            row["sequences"], row["size_bytes"] = found.get(row["id"], (0, 0))
        return rows

    return read


def trace_row(trace_id: str) -> Callable[[Session], dict[str, Any] | None]:
    """A read of one recording; None: there is none of that id."""

    def read(session: Session) -> dict[str, Any] | None:
        query = select(RecordedTrace.__table__).where(RecordedTrace.id == trace_id)
        row = session.execute(query).mappings().first()
        return None if row is None else dict(row)

    return read


def sequences_after(
    trace_id: str, after: tuple[float, int], limit: int
) -> Callable[[Session], list[dict[str, Any]]]:
    """A read of sequences of a recording, by arrival, from behind one of (time, id)."""
    time, key = TraceSequence.time, TraceSequence.id
    query: Select[Any] = (
        select(TraceSequence.__table__)
        .where(TraceSequence.trace_id == trace_id, tuple_(time, key) > after)
        .order_by(time, key)
        .limit(limit)
    )

    def read(session: Session) -> list[dict[str, Any]]:
        return [dict(row) for row in session.execute(query).mappings()]

    return read


def size_cutoff(connection: Connection | Session, limit_bytes: int) -> float | None:
    """Unix seconds before which sequences must go, so that the rest fits; None: all fit."""
    newest_first = (TraceSequence.time.desc(), TraceSequence.id.desc())
    held = func.sum(_SIZE).over(order_by=newest_first).label("held")
    sizes = select(TraceSequence.time.label("time"), held).subquery()
    query = select(func.max(sizes.c.time)).where(sizes.c.held > limit_bytes)
    found = connection.scalar(query)
    return None if found is None else math.nextafter(found, math.inf)
