"""A database that is locked, full, gone or too new: rows wait, are dropped and counted; no more."""

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from history import count, counted, samples, settled, until, written
from sqlalchemy import text
from starving import starved_seconds

from memd.store.errors import StoreError
from memd.store.reads import rows_of
from memd.store.store import Store

SUPPORT = Path(__file__).parents[2] / "support"

LOCK_SQLITE = """
import sqlite3, sys, time
other = sqlite3.connect(sys.argv[1], isolation_level=None)
other.execute("BEGIN IMMEDIATE")
other.execute("INSERT INTO events (time, kind, message, details) VALUES (1, 'other', '', '{}')")
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
other.execute("COMMIT")
"""


def locked_by_another_process(path: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOCK_SQLITE, str(path), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_c124_another_process_holds_the_write_lock(sqlite_place):
    """Nothing is lost, and adding rows costs what it always does."""

    async def run():
        async with sqlite_place.store() as store:
            process = locked_by_another_process(sqlite_place.directory / "history.db", 3.0)
            slowest, added, end = 0.0, 0, time.monotonic() + 3.2
            while time.monotonic() < end:
                before = time.monotonic() - starved_seconds()
                store.add_event("mine", str(added))
                slowest = max(slowest, time.monotonic() - starved_seconds() - before)
                added += 1
                await asyncio.sleep(0.01)
            assert process.wait(60) == 0
            await written(store)
            assert slowest < 0.1  # of a machine that runs other tests too
            assert await count(store, "events") == added + 1
            assert counted(store, "dropped") == 0

    asyncio.run(run())


def test_c124_others_commit_between_any_two_statements(sqlite_place):
    """A transaction that reads and then writes would fail at once; there is none."""

    async def run():
        async with sqlite_place.store() as store:
            path = sqlite_place.directory / "history.db"
            with closing(sqlite3.connect(path, isolation_level=None, timeout=5)) as other:
                for number in range(200):
                    store.add_rows("samples", samples(5))
                    other.execute(
                        "INSERT INTO job_runs (time, job, outcome) VALUES (?, 'x', 'ok')", (number,)
                    )
                    await asyncio.sleep(0.005)
            await written(store)
            assert store.status()["failure"] is None
            assert await count(store, "samples") == 1000
            assert await count(store, "job_runs") == 200

    asyncio.run(run())


def test_a_table_locked_on_the_server_only_delays(postgres_place):
    async def run():
        async with postgres_place.store() as store:
            lock = asyncio.create_task(
                asyncio.to_thread(
                    postgres_place.server.sql,
                    "BEGIN; LOCK TABLE events IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(2); COMMIT",
                    postgres_place.url.rpartition("/")[2],
                )
            )
            await asyncio.sleep(0.5)
            for number in range(50):
                store.add_event("mine", str(number))
            with pytest.raises(StoreError):
                await store.query(rows_of("events"), timeout_seconds=0.5)
            await lock
            await written(store)
            assert await count(store, "events") == 50

    asyncio.run(run())


def test_when_too_many_rows_wait_the_rare_ones_stay(sqlite_place):
    async def run():
        async with sqlite_place.store(queue_rows=5000) as store:
            process = locked_by_another_process(sqlite_place.directory / "history.db", 2.0)
            for number in range(100):
                store.add_event("rare", str(number))
                store.add_rows("samples", samples(100))
            assert store.queued_rows <= 5000 + 1000  # those that wait, and a batch at hand
            assert process.wait(60) == 0
            await written(store)
            assert store.row_counts["events", "dropped"] == 0
            assert await count(store, "events") == 101
            kept = await count(store, "samples")
            assert kept == store.row_counts["samples", "written"]
            assert kept + store.row_counts["samples", "dropped"] == 10_000
            assert 4000 <= kept <= 6000

    asyncio.run(run())


@pytest.mark.parametrize("whole_directory", [False, True])
def test_a_file_that_vanishes_is_made_anew(sqlite_place, whole_directory, caplog):
    async def run():
        directory = sqlite_place.directory = sqlite_place.directory / "state"
        async with sqlite_place.store() as store:
            store.add_event("first", "goes with the file")
            await written(store)
            if whole_directory:
                shutil.rmtree(directory)
            else:
                (directory / "history.db").unlink()
            with pytest.raises(StoreError):
                await count(store, "events")
            store.add_event("second", "stays")
            await written(store)
            rows, _ = await store.query(rows_of("events"))
            assert [row["kind"] for row in rows] == ["second"]
            assert counted(store, "dropped") == 0
            assert (directory / "history.db").stat().st_mode & 0o777 == 0o600

    asyncio.run(run())
    assert "the database file is gone" in caplog.text


def test_a_server_that_stops_and_comes_back(postgres_place, caplog):
    async def run():
        server = postgres_place.server
        async with postgres_place.store() as store:
            store.add_event("before", "")
            await written(store)
            await asyncio.to_thread(server.stop)
            try:
                for number in range(20):
                    store.add_event("while it is gone", str(number))
                await until(lambda: store.status()["state"] == "failing")
                with pytest.raises(StoreError, match="cannot be read"):
                    await count(store, "events")
            finally:
                await asyncio.to_thread(server.start)
            await written(store, 20.0)
            assert await count(store, "events") == 21
            assert store.status()["state"] == "ok"

    asyncio.run(run())
    assert "the database works again" in caplog.text
    assert caplog.text.count("rows wait") == 1


def test_a_server_database_that_is_emptied_is_filled_again(postgres_place):
    async def run():
        async with postgres_place.store() as store:
            name = postgres_place.url.rpartition("/")[2]
            drop = "DROP SCHEMA public CASCADE; CREATE SCHEMA public"
            await asyncio.to_thread(postgres_place.server.sql, drop, name)
            store.add_event("after", "")
            await written(store)
            assert await count(store, "events") == 1

    asyncio.run(run())


def test_a_database_that_is_gone_for_good_does_not_hold_up_the_end(postgres_place):
    async def run():
        store = Store(postgres_place.database(), postgres_place.settings())
        store.start()
        await settled(store)
        name = postgres_place.url.rpartition("/")[2]
        await asyncio.to_thread(postgres_place.server.sql, f'DROP DATABASE "{name}" WITH (FORCE)')
        store.add_rows("samples", samples(1500))
        await until(lambda: store.status()["failure"])
        started = time.monotonic()
        await store.stop(0.5)
        assert time.monotonic() - started < 3.0
        assert store.row_counts["samples", "dropped"] == 1500

    asyncio.run(run())


FULL = """
import asyncio, json, resource, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from history import count, samples, settled, until, written
from starving import starved_seconds
from memd.config_operator import HistorySettings
from memd.store.database import database_of
from memd.store.store import Store

async def run():
    settings = HistorySettings(queue_rows=2000)
    store = Store(database_of(settings, Path(sys.argv[1])), settings)
    store.start()
    await settled(store)
    store.add_event("before", "")
    await written(store)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
    added, slowest, end = 0, 0.0, time.monotonic() + 2
    while time.monotonic() < end:
        began = time.monotonic() - starved_seconds()
        store.add_rows("samples", samples(100))
        slowest = max(slowest, time.monotonic() - starved_seconds() - began)
        added += 100
        await asyncio.sleep(0.01)
    full = store.status()
    readable = await count(store, "events")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await written(store, 20)
    kept = await count(store, "samples")
    await store.stop(5)
    print(json.dumps({"added": added, "slowest": slowest, "full": full, "readable": readable,
                      "kept": kept, "after": store.status()}))

asyncio.run(run())
"""


def test_a_full_disk_drops_rows_until_there_is_room(tmp_path):
    """The file may grow to a limit, as on a small disk; then the limit is taken away."""
    command = [sys.executable, "-c", FULL, str(tmp_path), str(SUPPORT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["full"]["state"] == "failing"
    assert told["full"]["dropped_rows"]["samples"] > 0
    assert told["readable"] == 1
    assert told["slowest"] < 0.1
    assert told["after"]["state"] == "ok"
    assert told["kept"] == told["after"]["written_rows"]["samples"]
    assert told["kept"] + told["after"]["dropped_rows"]["samples"] == told["added"]
    with closing(sqlite3.connect(tmp_path / "history.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


HEAVY = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from history import settled
from memd.config_operator import HistorySettings
from memd.store.database import database_of
from memd.store.store import Store

async def run():
    settings = HistorySettings(url=sys.argv[2] or None, queue_rows=100_000)
    store = Store(database_of(settings, Path(sys.argv[1])), settings)
    store.start()
    await settled(store)
    number = 0
    while True:
        for _ in range(50):
            row = {"time": number, "metric": "memd_test", "labels": {}, "value": number}
            store.add_rows("samples", [row])
            number += 1
        print(store.row_counts["samples", "written"], flush=True)
        await asyncio.sleep(0.002)

asyncio.run(run())
"""


def test_kill_9_loses_nothing_that_was_written_and_breaks_nothing(place):
    command = [sys.executable, "-c", HEAVY, str(place.directory), place.url or "", str(SUPPORT)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = 0
    for line in process.stdout:
        told = int(line)
        if told > 10_000:
            break
    os.kill(process.pid, signal.SIGKILL)
    told = int((line + process.stdout.read()).split()[-1])
    process.wait(60)
    if place.url is None:
        with closing(sqlite3.connect(place.directory / "history.db")) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)

    async def run():
        async with place.store() as store:
            values = await store.query(
                lambda session: session.scalars(text("SELECT value FROM samples ORDER BY id")).all()
            )
            assert values == list(range(len(values)))  # whole batches, in order, none twice
            assert len(values) >= told

    asyncio.run(run())


def test_a_database_of_a_newer_memd_is_left_alone(place, caplog):
    async def run():
        async with place.store():
            pass
        with place.database().open() as connection, connection.begin():
            connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        async with place.store(queue_rows=100) as store:
            store.add_rows("samples", samples(200))
            status = store.status()
            assert status["state"] == "failing"
            assert "has the schema 9999, this memd knows those up to" in status["failure"]
            await until(lambda: store.row_counts["samples", "dropped"])
        assert counted(store, "written") == 0
        with place.database().reading(time.monotonic() + 5) as connection:
            assert connection.scalar(text("SELECT count(*) FROM samples")) == 0

    asyncio.run(run())
    assert "has the schema 9999" in caplog.text
