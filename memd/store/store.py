"""The store: what parts of the daemon call to keep rows and to look back at them.

Adding never blocks and never raises. Reads run on threads of their own with a deadline, so neither
the event loop nor a request for text ever waits for the database.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from memd.background import in_thread
from memd.config_operator import HistorySettings
from memd.store.database import Database
from memd.store.errors import StoreError, cause
from memd.store.retention import Prune, cutoffs
from memd.store.tables import TABLES, TableName
from memd.store.writer import Row, Writer

Result = TypeVar("Result")
QUERY_SECONDS = 5.0
_READERS = 2
_log = logging.getLogger(__name__)


class _Flush:
    """A task of the writer that is over when no rows of some tables wait."""

    def __init__(self, writer: Writer, names: Sequence[TableName]) -> None:
        self._writer = writer
        self._names = names

    def piece(self, connection: Connection) -> bool:
        """Between two batches."""
        return any(self._writer.has_queued(name) for name in self._names)


class Store:
    """One per daemon.

    Args:
        database: Where rows go.
        history: How long they are kept, and how many may wait.
        clock: Unix seconds.
    """

    def __init__(
        self,
        database: Database,
        history: HistorySettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._history = history
        self._clock = clock
        self._writer = Writer(database, history.queue_rows)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="history-read")
        self._closed = False

    def start(self) -> None:
        """Open the database, in the background. Rows may be added before."""
        self._writer.start()

    async def stop(self, limit_seconds: float) -> None:
        """Write what waits, for so long at most. Later rows are dropped."""
        self._closed = True
        self._readers.shutdown(wait=False, cancel_futures=True)
        await in_thread(lambda: self._writer.stop(limit_seconds), "history-stop")
        await in_thread(self._database.close, "history-stop")

    def add_event(self, kind: str, message: str, details: dict[str, Any] | None = None) -> None:
        """Keep something that happened, now.

        Args:
            kind: One of a few fixed words, such as `engine_death`; at most 64 characters.
            message: For people; no prompts and no secrets.
            details: The same as data, to be written as JSON.
        """
        row = {"time": self._clock(), "kind": kind, "message": message, "details": details or {}}
        self.add_rows("events", (row,))

    def add_rows(self, name: TableName, rows: Sequence[Row]) -> None:
        """Keep rows, which must not be changed any more.

        In `settings_revisions`, `incidents` and `silences` a row replaces the one of its key. Rows
        that the database refuses, and rows for which there is no room, are dropped and counted.

        Args:
            name: Of the table.
            rows: Columns by name; those left out are null, `id` of the other tables is made up.
        """
        if name in TABLES:
            self._writer.add(name, rows)
        else:
            _log.error("history: there is no table %r", name)

    async def flush(self, names: Sequence[TableName]) -> None:
        """Wait until what has been added to these tables can be read.

        Raises:
            StoreError: the database cannot be written now, or takes too long.
        """
        if self._closed:
            raise StoreError("the database is closed")
        try:
            async with asyncio.timeout(QUERY_SECONDS):
                await asyncio.wrap_future(self._writer.run(_Flush(self._writer, names)))
        except TimeoutError:
            raise StoreError(f"the database took no rows in {QUERY_SECONDS:g} s") from None

    async def query(
        self, read: Callable[[Session], Result], timeout_seconds: float = QUERY_SECONDS
    ) -> Result:
        """Read in one read-only transaction, on a thread.

        Args:
            read: Called with a session; must return plain data, not rows bound to the session.
            timeout_seconds: For all of it, waiting for a thread included.

        Raises:
            StoreError: the database cannot be read, or took too long.
        """
        if self._closed:
            raise StoreError("the database is closed")
        deadline = time.monotonic() + timeout_seconds
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_seconds + 0.5):  # the thread tells what was wrong
                return await loop.run_in_executor(self._readers, self._read, read, deadline)
        except TimeoutError:
            raise StoreError(f"the database did not answer in {timeout_seconds:g} s") from None

    def _read(self, read: Callable[[Session], Result], deadline: float) -> Result:
        # At the start: the tables may still have to be made.
        self._writer.settled.wait(max(0.0, deadline - time.monotonic()))
        try:
            with self._database.reading(deadline) as connection, Session(connection) as session:
                return read(session)
        except (SQLAlchemyError, OSError) as error:
            late = time.monotonic() > deadline
            why = "it took too long" if late else cause(error)
            raise StoreError(f"the database cannot be read: {why}") from None

    async def prune(self) -> dict[TableName, int]:
        """Delete what is too old, between the writes.

        Returns:
            Deleted rows by table.

        Raises:
            StoreError: the database cannot be written now.
        """
        return await self.delete_before(cutoffs(self._history, self._clock()))

    async def delete_before(self, before: Mapping[TableName, float]) -> dict[TableName, int]:
        """Delete the rows of tables that are older than these Unix seconds; see `prune`."""
        task = Prune(before)
        await asyncio.wrap_future(self._writer.run(task))
        return task.deleted

    @property
    def row_counts(self) -> dict[tuple[str, str], int]:
        """Rows since the start, by (table, "written" or "dropped"); every table is there."""
        writer = self._writer
        return {
            (name, outcome): counts[name]
            for outcome, counts in (("written", writer.written), ("dropped", writer.dropped))
            for name in TABLES
        }

    @property
    def queued_rows(self) -> int:
        """Rows that are not in the database yet."""
        return self._writer.queued_rows

    @property
    def database_bytes(self) -> int | None:
        """Size of all its files, as last measured; None: not known."""
        return self._writer.database_bytes

    def status(self) -> dict[str, Any]:
        """For operators. `failure` is why nothing can be written now, or null."""
        writer = self._writer
        state = "starting" if not writer.settled.is_set() else "ok"
        return {
            "database": self._database.name,
            "state": state if writer.failure is None else "failing",
            "failure": writer.failure,
            "queued_rows": writer.queued_rows,
            "database_bytes": writer.database_bytes,
            "written_rows": {name: writer.written[name] for name in TABLES},
            "dropped_rows": {name: writer.dropped[name] for name in TABLES},
        }
