"""The one thread that writes: rows wait in a bounded queue and go in batches.

Whoever adds rows never waits and never hears of the database. While it is locked, full or gone the
batch at hand is tried again, for as long as it takes, and rows queue up; when too many wait, the
oldest of whatever table has most of them are dropped, and counted, so that samples never push out
the few rows that matter.

A batch is one transaction. It is written twice only when a server's connection breaks between a
commit and its answer; rows of keyed tables are not even then.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from memd.store import schema
from memd.store.database import Database
from memd.store.errors import StoreError, cause, passes
from memd.store.insert import insert
from memd.store.tables import TABLES, TableName

Row = Mapping[str, Any]
BATCH_ROWS = 1000
BATCH_SECONDS = 0.5
# Between two pieces of a task. Whoever waits for SQLite's lock looks again after up to 25 ms, for
# as long as it has waited less than a tenth of a second; so it finds the lock free.
TASK_PAUSE_SECONDS = 0.03
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_SIZE_EVERY_SECONDS = 30.0
# Any number; the same in every memd, so that two daemons never write to one database.
_WRITER_LOCK = 0x6D656D64
_log = logging.getLogger(__name__)


class Task(Protocol):
    """Work on the database in small pieces, between the batches."""

    def piece(self, connection: Connection) -> bool:
        """Do one, in transactions of its own. False: it was the last."""


class Writer:
    """Owns the queue and the only connection that writes.

    Args:
        database: Where to.
        limit_rows: That may wait.
        batch_seconds: Longest time that a row waits for others; a killed process loses as much.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        database: Database,
        limit_rows: int,
        batch_seconds: float = BATCH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._limit_rows = limit_rows
        self._batch_seconds = batch_seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._queues: dict[TableName, deque[Row]] = {name: deque() for name in TABLES}
        self._waiting = 0
        self._at_hand = 0  # rows of the batch being written
        self._tasks: deque[tuple[Task, Future[None]]] = deque()
        self._stop_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)
        self._connection: Connection | None = None
        self._size_at = -_SIZE_EVERY_SECONDS
        self._failing_since: float | None = None
        self._refused: set[TableName] = set()
        self.settled = threading.Event()  # it has been opened, or could not be
        self.failure: str | None = None  # why nothing can be written now
        self.written = dict.fromkeys(TABLES, 0)
        self.dropped = dict.fromkeys(TABLES, 0)
        self.database_bytes: int | None = None

    @property
    def queued_rows(self) -> int:
        """Rows that are not in the database yet."""
        return self._waiting + self._at_hand

    def start(self) -> None:
        """Open the database, bring it to the newest schema, and write."""
        self._thread.start()

    def stop(self, limit_seconds: float) -> None:
        """Write what waits, for at most so long, and end; what is left is dropped. Blocks."""
        with self._changed:
            self._stop_by = self._clock() + limit_seconds
            self._changed.notify()
        if self._thread.ident is not None:
            # A statement under way is not cut off, unless its server is gone.
            self._thread.join(limit_seconds + 1.0)
        with self._changed:
            for name, queue in self._queues.items():
                self.dropped[name] += len(queue)
                queue.clear()
            self._waiting = 0
        if not self._thread.is_alive():
            self._end_tasks("the database is closed")

    def add(self, name: TableName, rows: Sequence[Row]) -> None:
        """Queue rows; they belong to the writer from now on."""
        with self._changed:
            queue = self._queues[name]
            before = self._waiting
            queue.extend(rows)
            self._waiting += len(rows)
            while self._waiting > self._limit_rows or (self._stopped and self._waiting):
                longest = max(self._queues, key=lambda table: len(self._queues[table]))
                self._queues[longest].popleft()
                self.dropped[longest] += 1
                self._waiting -= 1
            if before == 0 or before < BATCH_ROWS <= self._waiting:
                self._changed.notify()

    def has_queued(self, name: TableName) -> bool:
        """Whether rows of a table wait; those of the batch being written do not."""
        with self._changed:
            return bool(self._queues[name])

    def run(self, task: Task) -> "Future[None]":
        """Have a task done piece by piece; its future fails with what a piece raised."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # nobody cancels it under the thread's hands
        with self._changed:
            if self._stopped:
                done.set_exception(StoreError("the database is closed"))
            else:
                self._tasks.append((task, done))
                self._changed.notify()
        return done

    @property
    def _stopped(self) -> bool:
        return self._stop_by is not None and not self._thread.is_alive()

    @property
    def _stopping(self) -> bool:
        return self._stop_by is not None

    def _run(self) -> None:
        self._attempt(self._connected)
        self.settled.set()
        while self._wait():
            batch = self._take()
            if batch and not self._write(batch):
                break
            self._advance()
        self._disconnect()
        self._end_tasks("the database is closed")

    def _wait(self) -> bool:
        """Until there is something to do. False: everything is written, and it shall end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting or self._tasks or self._stopping, _SIZE_EVERY_SECONDS
            )
            if self._tasks:
                self._changed.wait_for(lambda: self._stopping, TASK_PAUSE_SECONDS)
            elif self._waiting:
                self._changed.wait_for(
                    lambda: self._waiting >= BATCH_ROWS or self._tasks or self._stopping,
                    self._batch_seconds,
                )
            return bool(self._waiting) or not self._stopping

    def _take(self) -> dict[TableName, list[Row]]:
        """The next batch; of rare rows all, of samples what has room beside them."""
        batch: dict[TableName, list[Row]] = {}
        room = BATCH_ROWS
        with self._changed:
            for name in sorted(self._queues, key=lambda table: len(self._queues[table])):
                queue = self._queues[name]
                if queue and room:
                    batch[name] = [queue.popleft() for _ in range(min(room, len(queue)))]
                    room -= len(batch[name])
            self._at_hand = BATCH_ROWS - room
            self._waiting -= self._at_hand
        return batch

    def _write(self, batch: dict[TableName, list[Row]]) -> bool:
        """Write a batch, however long it takes. False: it was dropped, because time is up."""
        pause = _FIRST_PAUSE_SECONDS
        while not self._attempt(lambda: self._commit(batch)):
            self._end_tasks(self.failure or "the database fails")
            with self._changed:
                if self._stop_by is None:
                    self._changed.wait_for(lambda: self._stopping, pause)
                else:
                    self._changed.wait(min(pause, max(0.0, self._stop_by - self._clock())))
            if self._stop_by is not None and self._clock() >= self._stop_by:
                for name, rows in batch.items():
                    self.dropped[name] += len(rows)
                self._at_hand = 0
                return False
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._at_hand = 0
        return True

    def _attempt(self, work: Callable[[], object]) -> bool:
        """Do something that needs the database; log when that stops or begins to work."""
        try:
            work()
        except Exception as error:
            self._disconnect()
            if self._failing_since is None:
                self._failing_since = self._clock()
                _log.warning("history: rows wait, the database fails: %s", cause(error))
            self.failure = cause(error)
            return False
        if self._failing_since is not None:
            took = self._clock() - self._failing_since
            _log.warning("history: the database works again, after %.1f s", took)
            self._failing_since = None
        self.failure = None
        return True

    def _commit(self, batch: dict[TableName, list[Row]]) -> None:
        connection = self._connected()
        try:
            with connection.begin():
                for name, rows in batch.items():
                    insert(connection, name, rows)
            counts = {name: len(rows) for name, rows in batch.items()}
        except Exception as error:
            if passes(error):
                raise
            counts = self._commit_one_by_one(connection, batch)
        for name, count in counts.items():
            self.written[name] += count
        if self._clock() - self._size_at >= _SIZE_EVERY_SECONDS:
            self._measure(connection)

    def _commit_one_by_one(
        self, connection: Connection, batch: dict[TableName, list[Row]]
    ) -> dict[TableName, int]:
        """A row that no database takes must not hold up the others: it is dropped."""
        counts = dict.fromkeys(batch, 0)
        refused = dict.fromkeys(batch, 0)
        with connection.begin():
            for name, rows in batch.items():
                for row in rows:
                    try:
                        with connection.begin_nested():
                            insert(connection, name, [row])
                        counts[name] += 1
                    except Exception as error:
                        if passes(error):
                            raise
                        refused[name] += 1
                        self._tell_refused(name, error)
        for name, count in refused.items():
            self.dropped[name] += count
        return counts

    def _tell_refused(self, name: TableName, error: Exception) -> None:
        if name not in self._refused:
            self._refused.add(name)
            _log.error("history: a row of %s is refused: %s", name, type(error).__name__)

    def _advance(self) -> None:
        """One piece of the first task."""
        if not self._tasks:
            return
        task, done = self._tasks[0]
        try:
            more = task.piece(self._connected())
        except Exception as error:
            self._disconnect()
            self._tasks.popleft()
            done.set_exception(StoreError(cause(error)))
            return
        if not more:
            self._tasks.popleft()
            self._attempt(lambda: self._measure(self._connected()))
            done.set_result(None)

    def _end_tasks(self, why: str) -> None:
        with self._changed:
            while self._tasks:
                self._tasks.popleft()[1].set_exception(StoreError(why))

    def _connected(self) -> Connection:
        """The connection, new if there is none or the file behind it has gone."""
        if self._connection is not None and self._database.vanished():
            _log.warning("history: the database file is gone; a new one is made")
            self._disconnect()
        if self._connection is None:
            connection = self._connection = self._database.open()
            if not self._database.is_sqlite:
                with connection.begin():
                    locked = connection.scalar(text(f"SELECT pg_try_advisory_lock({_WRITER_LOCK})"))
                if not locked:
                    raise StoreError("another daemon writes to this database")
            with connection.begin():
                schema.upgrade(connection)
            self._measure(connection)
        return self._connection

    def _measure(self, connection: Connection) -> None:
        with connection.begin():
            self.database_bytes = self._database.size_bytes(connection)
        self._size_at = self._clock()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except SQLAlchemyError:
                connection.invalidate()
