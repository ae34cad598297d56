"""Deleting what is too old, in pieces so small that no other writer waits long.

On SQLite the freed pages are given back to the file system as well: rows that are only deleted
leave the file as large as it was.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping

from sqlalchemy import Connection, delete, exists, func, select
from sqlalchemy.sql import ColumnElement

from memd.config_operator import HistorySettings
from memd.store.database import LOCK_WAIT_SECONDS
from memd.store.tables import TableName, table

# A piece is made longer or shorter until it takes about this; others wait for one piece at most.
AIM_SECONDS = 0.02
_FIRST_ROWS = 500
_MOST_ROWS = 10_000
_VACUUM_PAGES = 500  # 2 MB
_LOG_TRIES = 10  # to shorten SQLite's log


def cutoffs(history: HistorySettings, now: float) -> dict[TableName, float]:
    """Unix seconds before which rows of a table are too old. Settings' revisions are kept."""
    events = now - history.keep_events
    return {
        "samples": now - history.keep_samples,
        "requests": now - history.keep_requests,
        **dict.fromkeys(("trace_requests", "traces"), now - history.keep_traces),
        **dict.fromkeys(("events", "incidents", "silences", "notifications", "job_runs"), events),
    }


class Prune:
    """One run of retention; a task of the writer, or run to its end by `memd db prune`.

    Args:
        before: Unix seconds by table.
        clock: Monotonic seconds.
    """

    def __init__(
        self, before: Mapping[TableName, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._before = before
        self._clock = clock
        self.deleted: dict[TableName, int] = dict.fromkeys(before, 0)
        self._pieces: Iterator[None] | None = None

    def piece(self, connection: Connection) -> bool:
        """Do one piece. False: it was the last.

        Raises:
            sqlalchemy.exc.DBAPIError: the database cannot be written; what was deleted stays so.
        """
        if self._pieces is None:
            self._pieces = self._run(connection)
        try:
            return next(self._pieces, self) is not self
        except Exception:
            self._pieces = None  # the next piece begins anew, with what is left
            raise

    def _run(self, connection: Connection) -> Iterator[None]:
        for name, before in self._before.items():
            rows = _FIRST_ROWS
            while True:
                started = self._clock()
                with connection.begin():
                    deleted = _delete(connection, name, before, rows)
                self.deleted[name] += deleted
                took = self._clock() - started
                if deleted < rows:
                    break
                rows = max(
                    _FIRST_ROWS,
                    min(_MOST_ROWS, int(rows * min(2.0, AIM_SECONDS / max(took, 1e-6)))),
                )
                yield
        if connection.dialect.name == "sqlite":
            yield from _give_back(connection)


def _too_old(name: TableName, before: float) -> ColumnElement[bool]:
    columns = table(name).c
    if name == "incidents":  # one that goes on is kept however old it is
        return columns.resolved_at < before
    if name == "silences":
        return columns.expires_at < before
    if name == "traces":  # one that has sequences is kept, and so is one that goes on
        left = table("trace_requests").c.trace_id == columns.id
        return (columns.updated_at < before) & ~exists().where(left)
    return columns.time < before


def _delete(connection: Connection, name: TableName, before: float, rows: int) -> int:
    key = table(name).c.id
    oldest = select(key).where(_too_old(name, before)).order_by(table(name).c.time).limit(rows)
    return connection.execute(delete(table(name)).where(key.in_(oldest))).rowcount


def _give_back(connection: Connection) -> Iterator[None]:
    """Shorten SQLite's file by its free pages, then its log."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)

    def free_pages() -> int:
        return int(driver.execute("PRAGMA freelist_count").fetchone()[0])

    before = free_pages()
    while before:
        # It yields a row a page, without columns, which `execute` takes for the end.
        driver.executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
        yield
        left = free_pages()
        if left >= before:
            break
        before = left
    # Most of the log is written back beside other writers. Shortening it keeps them out, so whoever
    # is in it is not waited for; if somebody is each time, the next run will do.
    for _ in range(_LOG_TRIES):
        driver.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        yield
        if _shorten_log(driver):
            break


def _shorten_log(driver: sqlite3.Connection) -> bool:
    """At once, or not at all: False."""
    driver.execute("PRAGMA busy_timeout=0").fetchall()
    try:
        [(busy, *_)] = driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        driver.execute(f"PRAGMA busy_timeout={int(1000 * LOCK_WAIT_SECONDS)}").fetchall()
    return not busy


def count_too_old(
    connection: Connection, before: Mapping[TableName, float]
) -> dict[TableName, int]:
    """How many rows a run would delete, by table."""
    return {
        name: connection.scalar(
            select(func.count()).select_from(table(name)).where(_too_old(name, each))
        )
        or 0
        for name, each in before.items()
    }
