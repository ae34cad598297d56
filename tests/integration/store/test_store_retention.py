"""Old rows go, in pieces that hold nobody up, and the file becomes smaller."""

import asyncio
import sqlite3
import threading
import time
from contextlib import closing

import pytest
from history import count, samples, written
from sqlalchemy import text

from memd.store.errors import StoreError
from memd.store.retention import Prune, count_too_old, cutoffs

HOUR = 3600.0
MILLION = 1_000_000


def test_each_table_has_its_own_age_and_what_goes_on_stays(place):
    now = time.time()
    ages = {"keep_samples": 10.0, "keep_requests": 20.0, "keep_events": 30.0}

    async def run():
        async with place.store(**ages) as store:
            for age in (5.0, 15.0, 25.0, 35.0):
                at = now - age
                store.add_rows("samples", samples(1, at))
                store.add_rows("events", [{"time": at, "kind": "x", "message": "", "details": {}}])
                store.add_rows("job_runs", [{"time": at, "job": "x", "outcome": "ok"}])
                request = {"time": at, "received_at": at, "request_id": "r", "tenant": ""}
                request |= {"endpoint": "completions", "model": "m", "outcome": "ok"}
                store.add_rows("requests", [{**request, "duration_seconds": 0.0}])
                revision = {"revision": int(age), "time": at, "who": "a", "reason": "r"}
                revision |= {"kind": "change", "changes": {}, "persist": False}
                store.add_rows("settings_revisions", [revision])
            incident = {"time": now - 99, "name": "x", "labels": {}, "severity": "page"}
            incident |= {"state": "firing", "summary": ""}
            store.add_rows(
                "incidents",
                [
                    {**incident, "id": "goes on"},
                    {**incident, "id": "long ago", "resolved_at": now - 50},
                    {**incident, "id": "lately", "resolved_at": now - 5},
                ],
            )
            silence = {"time": now - 99, "matchers": [], "reason": "r", "author": "a"}
            store.add_rows(
                "silences",
                [
                    {**silence, "id": "holds", "expires_at": now + 50},
                    {**silence, "id": "over", "expires_at": now - 50},
                ],
            )
            await written(store)
            expected = {"samples": 3, "requests": 2, "events": 1, "job_runs": 1}
            expected |= {"incidents": 1, "silences": 1, "notifications": 0}
            expected |= {"traces": 0, "trace_requests": 0}
            before = cutoffs(place.settings(**ages), now)
            assert await store.query(lambda s: count_too_old(s.connection(), before)) == expected
            assert await store.prune() == expected
            assert await count(store, "settings_revisions") == 4
            assert await count(store, "samples") == 1
            assert set(await store.prune()) == set(expected)
            assert sum((await store.prune()).values()) == 0

    asyncio.run(run())


def test_pruning_goes_on_while_rows_are_written(place):
    async def run():
        async with place.store(keep_samples=HOUR, queue_rows=50_000) as store:
            store.add_rows("samples", samples(20_000, 1000.0))
            await written(store, 30.0)
            pruning = asyncio.create_task(store.prune())
            for number in range(50):
                store.add_event("meanwhile", str(number))
                await asyncio.sleep(0.005)
            assert (await pruning)["samples"] == 20_000
            await written(store)
            assert await count(store, "events") == 50
            assert await count(store, "samples") == 0

    asyncio.run(run())


def test_a_prune_that_fails_says_so_and_the_next_one_goes_on(sqlite_place):
    async def run():
        async with sqlite_place.store(keep_samples=HOUR) as store:
            store.add_rows("samples", samples(5000, 1000.0))
            await written(store)
            path = sqlite_place.directory / "history.db"
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                with pytest.raises(StoreError, match="locked"):
                    await store.prune()
                store.add_event("waits", "and the next prune is not to wait behind it")
                with pytest.raises(StoreError, match="locked"):
                    await asyncio.wait_for(store.prune(), 10)
                other.execute("COMMIT")
            assert (await store.prune())["samples"] == 5000

    asyncio.run(run())


def test_a_piece_that_failed_is_done_again(place):
    async def run():
        async with place.store() as store:
            store.add_rows("samples", samples(1200, 1000.0))
            await written(store)
        with place.database().open() as connection:
            task = Prune({"samples": 5000.0})
            assert task.piece(connection)
            with connection.begin():
                connection.execute(text("ALTER TABLE samples RENAME TO elsewhere"))
            with pytest.raises(Exception, match="samples"):
                task.piece(connection)
            with connection.begin():
                connection.execute(text("ALTER TABLE elsewhere RENAME TO samples"))
            while task.piece(connection):
                pass
            assert task.deleted == {"samples": 1200}

    asyncio.run(run())


def test_the_log_is_shortened_once_nobody_is_in_it(sqlite_place):
    path = sqlite_place.directory / "history.db"
    log = path.with_name("history.db-wal")

    async def filled():
        async with sqlite_place.store() as store:
            store.add_rows("samples", samples(5000, 1000.0))
            await written(store)

    asyncio.run(filled())
    task = Prune({"samples": 6000.0})
    with (
        sqlite_place.database().open() as connection,
        closing(sqlite3.connect(path, isolation_level=None)) as reader,
    ):
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM samples").fetchone()
        while task.deleted["samples"] < 5000:
            assert task.piece(connection)
        for _ in range(5):
            assert task.piece(connection)
            assert log.stat().st_size > 0
        reader.execute("COMMIT")
        while task.piece(connection):
            pass
        assert log.stat().st_size == 0


class OtherWriter(threading.Thread):
    """Writes as another process would, and times how long it waits for the lock.

    Args:
        path: Of the database.
    """

    PAUSE = 0.02

    def __init__(self, path):
        super().__init__()
        self._path = path
        self._ended = threading.Event()
        self.waits = []
        self.lateness = []  # of its own pauses: what the machine adds to any wait

    def run(self):
        row = "INSERT INTO events (time, kind, message, details) VALUES (1e12, 'x', '', '{}')"
        with closing(sqlite3.connect(self._path, isolation_level=None, timeout=30)) as database:
            while True:
                before = time.perf_counter()
                if self._ended.wait(self.PAUSE):
                    return
                self.lateness.append(time.perf_counter() - before - self.PAUSE)
                before = time.perf_counter()
                database.execute("BEGIN IMMEDIATE")
                self.waits.append(time.perf_counter() - before)
                database.execute(row)
                database.execute("COMMIT")

    def end(self):
        self._ended.set()
        self.join()


def fill(path, now):
    """A million samples, one each 10 ms until now, as a fast clock would make them."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA synchronous=OFF")
        database.execute(
            """
            WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
            INSERT INTO samples (time, metric, labels, value)
            SELECT ? - (? - i) * 0.01, 'memd_metric_' || (i % 40), '{"gpu": "0"}', i FROM n
            """,
            (MILLION - 1, now, MILLION),
        )


@pytest.mark.slow
def test_c126_a_million_samples_are_pruned_and_the_file_shrinks(sqlite_place, record_property):
    """Keep 1,000 s of 10,000 s. Nobody waits 200 ms for the lock; file + log <= 2 x live data."""
    path = sqlite_place.directory / "history.db"

    async def run():
        async with sqlite_place.store(keep_samples=1000.0) as store:
            now = time.time()
            await asyncio.to_thread(fill, path, now)
            full = path.stat().st_size
            other = OtherWriter(path)
            other.start()
            started = time.perf_counter()
            try:
                deleted = (await store.prune())["samples"]
            finally:
                other.end()
            took = time.perf_counter() - started
            slowest, late = max(other.waits), max(other.lateness)
            left = await count(store, "samples")
            assert deleted + left == MILLION
            assert 0 < left <= MILLION / 10
            size = sum(each.stat().st_size for each in path.parent.glob("history.db*"))
            live = path.with_name("live.db")
            with closing(sqlite3.connect(path, isolation_level=None)) as database:
                old = database.execute("SELECT count(*) FROM samples WHERE time < ?", (now - 1000,))
                assert old.fetchone() == (0,)
                database.execute("VACUUM INTO ?", (str(live),))
            told = f"{deleted} rows in {took:.1f} s, slowest other write {slowest * 1000:.0f} ms, "
            told += f"machine late by {late * 1000:.0f} ms, "
            told += f"file {full >> 20} -> {size >> 20} MiB, live {live.stat().st_size >> 20} MiB"
            record_property("table", told)
            assert size <= 2 * live.stat().st_size
            assert store.database_bytes <= 2 * live.stat().st_size
            assert slowest < 0.2 + 2 * late

    asyncio.run(run())
