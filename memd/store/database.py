"""Which database it is, and connections to it that behave the same on SQLite and PostgreSQL.

A write connection takes SQLite's write lock when a transaction begins: a transaction that reads
first and takes it later fails at once when somebody else has written in between, however long the
timeout is. A read connection cannot write, and ends by itself at its deadline.
"""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool

from memd.config_operator import HistorySettings
from memd.store.errors import StoreError

DATABASE_FILE = "history.db"
CONNECT_SECONDS = 3
LOCK_WAIT_SECONDS = 1.0
_JOURNAL_LIMIT_BYTES = 4 * 2**20
_WRITE_PRAGMAS = (
    "PRAGMA auto_vacuum=INCREMENTAL",  # heard only before the first table is made
    "PRAGMA journal_mode=WAL",
    # Survives a killed process; a power cut may take the latest transactions, never the file.
    "PRAGMA synchronous=NORMAL",
    f"PRAGMA journal_size_limit={_JOURNAL_LIMIT_BYTES}",
    "PRAGMA secure_delete=OFF",  # some builds fill deleted rows with zeros, at twice the time
    "PRAGMA cache_size=-8000",
)
# Without these a dead network or a hung server would hold a thread for a quarter of an hour.
_POSTGRES_ARGS = {
    "connect_timeout": CONNECT_SECONDS,
    "tcp_user_timeout": 5000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "application_name": "memd",
}


class Database:
    """One database; nothing is opened before it is asked for.

    Args:
        url: Of SQLite or PostgreSQL.
    """

    def __init__(self, url: URL) -> None:
        self.url = url
        self.path = Path(url.database).absolute() if _is_sqlite(url) and url.database else None
        self._identity: tuple[int, int] | None = None
        make = self._make_sqlite if self.path is not None else self._make_postgres
        self._writing = make(writes=True)
        self._reading = make(writes=False)

    @property
    def name(self) -> str:
        """The URL without its password, for people."""
        return self.url.render_as_string(hide_password=True)

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file of this machine."""
        return self.path is not None

    def open(self) -> Connection:
        """A connection that writes; the file is made, for its owner alone, if there is none.

        Raises:
            sqlalchemy.exc.DBAPIError, OSError: it cannot be opened now.
        """
        if self.path is not None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite gives its journal files the permissions of this one. Never opened once it is
            # there: closing it would free the locks of this process's other connections.
            with suppress(FileExistsError):
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        connection = self._writing.connect()
        self._identity = self._on_disk()
        return connection

    def vanished(self) -> bool:
        """Whether the file of `open` is no longer there: writing on would fill a deleted file."""
        return self._identity != self._on_disk()

    def _on_disk(self) -> tuple[int, int] | None:
        if self.path is None:
            return None
        try:
            stat = os.stat(self.path)
        except OSError:
            return None
        return stat.st_dev, stat.st_ino

    @contextmanager
    def reading(self, deadline: float) -> Iterator[Connection]:
        """A connection in a read-only transaction.

        Args:
            deadline: Monotonic seconds; a statement that still runs then fails.

        Raises:
            StoreError: the deadline has passed.
            sqlalchemy.exc.DBAPIError: it cannot be read.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreError("the database did not answer in time")
        with self._reading.connect() as connection:
            if self.path is not None:
                driver = connection.connection.driver_connection
                assert isinstance(driver, sqlite3.Connection)
                driver.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
            else:
                connection.execute(text("SET TRANSACTION READ ONLY"))
                milliseconds = max(1, int(left * 1000))
                connection.execute(text(f"SET LOCAL statement_timeout = {milliseconds}"))
            yield connection

    def size_bytes(self, connection: Connection) -> int:
        """Of all its files, the write-ahead log included. Raises DBAPIError, OSError."""
        if self.path is None:
            return int(connection.scalar(text("SELECT pg_database_size(current_database())")) or 0)
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """Drop the connections that are kept."""
        self._writing.dispose()
        self._reading.dispose()

    def _make_sqlite(self, writes: bool) -> Engine:
        path = f"file:{quote(str(self.path))}?mode=rw"

        def connect() -> sqlite3.Connection:
            driver = sqlite3.connect(
                path,
                uri=True,
                timeout=LOCK_WAIT_SECONDS,
                isolation_level=None,  # else the driver begins transactions, and begins them late
                check_same_thread=False,
            )
            for pragma in _WRITE_PRAGMAS if writes else ("PRAGMA query_only=ON",):
                driver.execute(pragma).fetchall()
            return driver

        # A connection of its own for every read costs 0.3 ms and never reads a deleted file.
        engine = create_engine("sqlite://", creator=connect, poolclass=NullPool, **_ENGINE)
        begin = "BEGIN IMMEDIATE" if writes else "BEGIN"
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
        return engine

    def _make_postgres(self, writes: bool) -> Engine:
        args = {key: value for key, value in _POSTGRES_ARGS.items() if key not in self.url.query}
        pool: dict[str, Any] = {"pool_size": 2, "max_overflow": 0, "pool_pre_ping": True}
        if writes:
            pool = {"poolclass": NullPool}
        return create_engine(self.url, connect_args=args, **pool, **_ENGINE)


# Values of a statement never reach a log or an error.
_ENGINE: dict[str, Any] = {"hide_parameters": True}


def database_of(history: HistorySettings, state_dir: Path) -> Database:
    """The database that the settings name.

    Raises:
        StoreError: the URL's file cannot be read, or the URL is not one that memd can use.
    """
    if history.url_file is not None:
        path = history.url_file.expanduser()
        try:
            given = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"history.url_file {path} cannot be read: {error}") from None
        return Database(parse_url(given, f"the URL in {path}"))
    if history.url is None:
        return Database(URL.create("sqlite", database=str(state_dir / DATABASE_FILE)))
    return Database(parse_url(history.url, "history.url"))


def parse_url(given: str, what: str) -> URL:
    """A URL with the driver that memd has.

    Args:
        given: As people write it; may hold a password, which no error repeats.
        what: Names it in errors.

    Raises:
        StoreError: it is none, or of another database.
    """
    try:
        url = make_url(given)
    except (ArgumentError, ValueError):
        raise StoreError(f"{what} is no URL such as postgresql://USER@HOST/NAME") from None
    kind = url.drivername.partition("+")[0]
    if kind in ("postgresql", "postgres"):
        return _with_driver(url.set(drivername="postgresql+psycopg"))
    if kind == "sqlite" and url.database not in (None, "", ":memory:"):
        return url.set(drivername="sqlite")
    raise StoreError(
        f"{what} is of {kind}, it must be postgresql://USER@HOST/NAME or sqlite:///PATH"
    )


def _with_driver(url: URL) -> URL:
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise StoreError(
            "PostgreSQL needs a driver that is not installed: pip install 'memd-kv[postgres]'"
        ) from None
    return url


def _is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"
