"""What goes in comes out again, on both databases."""

import asyncio
import time

import pytest
from history import count, counted, samples, settled, written
from sqlalchemy import text

from memd.store.errors import StoreError
from memd.store.reads import rows_of, samples_of, summary
from memd.store.store import Store

EVERY_TABLE = {
    "settings_revisions": {
        "revision": 3,
        "time": 5.0,
        "who": "ada",
        "reason": "less reclaim",
        "kind": "change",
        "changes": {"memory.watermark.high": {"old": 0.9, "new": 0.85}},
        "undoes": None,
        "confirm_by": 65.5,
        "source": "cli",
        "persist": True,
    },
    "events": {"time": 5.0, "kind": "engine_death", "message": "gone", "details": {"n": [1, None]}},
    "samples": {"time": 5.0, "metric": "memd_x", "labels": {"b": "ü", "a": ""}, "value": 1e300},
    "requests": {
        "time": 5.5,
        "received_at": 5.0,
        "request_id": "cmpl-1",
        "client_id": None,
        "tenant": "",
        "endpoint": "completions",
        "model": "tiny",
        "outcome": "ok",
        "finish_reason": "stop",
        "priority": -2,
        "sequences": 2,
        "prompt_tokens": 7,
        "generated_tokens": 9,
        "cached_device_tokens": 4,
        "cached_host_tokens": 0,
        "missed_tokens": 2,
        "missed_evicted_tokens": 0,
        "first_missing_token": 4,
        "miss_reason": "differs",
        "peak_pages": 3,
        "preemptions": 1,
        "queue_seconds": 0.25,
        "stall_seconds": 0.125,
        "time_to_first_token_seconds": 0.375,
        "duration_seconds": 0.5,
    },
    "incidents": {
        "id": "i1",
        "time": 5.0,
        "name": "MemdThrashing",
        "labels": {"severity": "page"},
        "severity": "page",
        "state": "firing",
        "value": 0.5,
        "threshold": 0.25,
        "summary": "too much",
        "fired_at": 6.0,
        "resolved_at": None,
    },
    "silences": {
        "id": "s1",
        "time": 5.0,
        "matchers": [{"name": "severity", "value": "page"}],
        "reason": "known",
        "author": "ada",
        "expires_at": 9.0,
    },
    "notifications": {
        "time": 5.0,
        "channel": "ops",
        "kind": "firing",
        "alert": "MemdThrashing",
        "incident_id": "i1",
        "outcome": "failed",
        "attempts": 2,
        "error": "timed out",
    },
    "job_runs": {
        "time": 5.0,
        "job": "retention",
        "outcome": "ok",
        "duration_seconds": 0.5,
        "error": None,
    },
}


@pytest.mark.parametrize("name", EVERY_TABLE)
def test_a_row_comes_back_as_it_went_in(place, name):
    async def run():
        async with place.store() as store:
            store.add_rows(name, [EVERY_TABLE[name]])
            await written(store)
            rows, more = await store.query(rows_of(name))
            assert not more
            [row] = rows
            row.pop("id", None)
            assert row == {key: each for key, each in EVERY_TABLE[name].items() if key != "id"}
            assert store.row_counts[name, "written"] == 1
            assert counted(store, "dropped") == 0

    asyncio.run(run())


def test_rows_added_before_the_start_are_kept(place):
    async def run():
        store = Store(place.database(), place.settings())
        store.add_event("daemon_start", "early")
        store.start()
        await written(store)
        assert await count(store, "events") == 1
        await store.stop(5.0)

    asyncio.run(run())


def test_stop_writes_what_waits_and_later_rows_are_dropped(place):
    async def run():
        async with place.store() as store:
            store.add_rows("samples", samples(2500))
            await store.stop(10.0)
            assert store.row_counts["samples", "written"] == 2500
            store.add_event("late", "nobody writes this")
            assert store.row_counts["events", "dropped"] == 1
            assert store.queued_rows == 0
            with pytest.raises(StoreError, match="closed"):
                await count(store, "samples")
            with pytest.raises(StoreError, match="closed"):
                await store.prune()
        async with place.store() as again:
            assert await count(again, "samples") == 2500

    asyncio.run(run())


def test_a_keyed_row_replaces_the_one_of_its_key(place):
    async def run():
        async with place.store() as store:
            incident = EVERY_TABLE["incidents"]
            store.add_rows("incidents", [incident])
            await written(store)
            store.add_rows(
                "incidents",
                [{**incident, "state": "resolved", "resolved_at": 9.0}, {**incident, "id": "i2"}],
            )
            await written(store)
            rows, _ = await store.query(rows_of("incidents"))
            assert {row["id"]: row["state"] for row in rows} == {"i1": "resolved", "i2": "firing"}

    asyncio.run(run())


def test_a_row_that_no_database_takes_does_not_hold_up_the_others(place, caplog):
    bad = [
        {"time": None, "kind": "x", "message": "secret", "details": {}},  # null where it may not
        {"time": 1.0, "kind": "x", "message": "secret", "details": {"x": object()}},  # no JSON
        {"time": 1.0, "kind": "x", "message": {"a": 1}, "details": {}},  # of another type
        {"time": 1.0, "kind": "x", "message": "secret", "details": {}, "colour": "red"},
    ]

    async def run():
        async with place.store() as store:
            store.add_event("good", "before")
            store.add_rows("events", bad)
            store.add_rows("requests", [{**EVERY_TABLE["requests"], "prompt_tokens": 2**80}])
            store.add_event("good", "after")
            store.add_rows("no_such_table", [{}])
            await written(store)
            assert store.row_counts["events", "dropped"] == len(bad)
            assert store.row_counts["requests", "dropped"] == 1
            rows, _ = await store.query(rows_of("events"))
            assert {row["message"] for row in rows} == {"before", "after"}
            assert store.status()["failure"] is None

    asyncio.run(run())
    assert "a row of events is refused" in caplog.text
    assert "no_such_table" in caplog.text
    assert "secret" not in caplog.text


def test_rows_are_found_by_time_and_column_newest_first(place):
    async def run():
        async with place.store() as store:
            rows = [
                {"time": float(at), "kind": f"k{at % 2}", "message": str(at), "details": {}}
                for at in range(10)
            ]
            store.add_rows("events", rows)
            await written(store)

            async def found(**query):
                rows, more = await store.query(rows_of("events", **query))
                return [int(row["message"]) for row in rows], more

            assert await found() == ([9, 8, 7, 6, 5, 4, 3, 2, 1, 0], False)
            assert await found(limit=3) == ([9, 8, 7], True)
            assert await found(since=3.0, until=6.0) == ([5, 4, 3], False)
            assert await found(kind="k1", limit=5) == ([9, 7, 5, 3, 1], False)
            assert await found(kind="k2") == ([], False)

    asyncio.run(run())


def test_samples_come_as_steps_with_mean_and_extremes(place):
    async def run():
        async with place.store() as store:
            store.add_rows("samples", [*samples(60), *samples(5, metric="memd_other")])
            await written(store)
            series, more = await store.query(samples_of("memd_test", 1000.0, 1050.0, 15.0))
            assert not more
            assert [each["labels"] for each in series] == [{"part": "0"}, {"part": "1"}]
            assert series[0]["times"] == [990.0, 1005.0, 1020.0, 1035.0]
            assert series[0]["values"] == [2.0, 12.0, 27.0, 42.0]
            assert series[0]["lows"] == [0.0, 6.0, 20.0, 36.0]
            assert series[0]["highs"] == [4.0, 18.0, 34.0, 48.0]
            # A step's end belongs to the next on both databases: none rounds.
            series, _ = await store.query(samples_of("memd_test", 1000.0, 1004.0, 4.0))
            assert [each["values"] for each in series] == [[1.0], [2.0]]
            assert await store.query(samples_of("memd_none", 0.0, 1e10, 60.0)) == ([], False)

    asyncio.run(run())


def test_a_read_that_takes_too_long_ends_and_holds_up_nobody(place):
    forever = (
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t"
    )

    async def run():
        async with place.store() as store:
            started = time.monotonic()
            slow = [
                asyncio.create_task(store.query(lambda s: s.execute(text(forever)).all(), 0.5))
                for _ in range(4)
            ]
            store.add_event("meanwhile", "writes go on")
            await written(store, 2.0)
            for each in await asyncio.gather(*slow, return_exceptions=True):
                assert isinstance(each, StoreError)
            assert time.monotonic() - started < 3.0
            assert await count(store, "events") == 1

    asyncio.run(run())


def test_a_read_cannot_write(place):
    async def run():
        async with place.store() as store:
            with pytest.raises(StoreError):
                await store.query(lambda session: session.execute(text("DELETE FROM events")))

    asyncio.run(run())


def test_the_size_is_known_and_counts_what_is_written(place):
    async def run():
        async with place.store(queue_rows=20_000) as store:
            before = store.database_bytes
            start = float(int(time.time()) - 20_000)
            store.add_rows("samples", samples(20_000, start))
            await written(store, 30.0)
            await store.prune()  # finds nothing too old, and measures
            assert before
            assert store.database_bytes > before + 500_000
            tables = await store.query(summary)
            assert tables["samples"] == {
                "rows": 20_000,
                "oldest": start,
                "newest": start + 19_999,
            }
            assert tables["silences"] == {"rows": 0, "oldest": None, "newest": None}

    asyncio.run(run())


def test_only_one_daemon_writes_to_a_server_database(postgres_place):
    async def run():
        async with postgres_place.store() as first:
            second = Store(postgres_place.database(), postgres_place.settings())
            second.start()
            await settled(second)
            assert second.status()["failure"] == "another daemon writes to this database"
            second.add_event("second", "waits for its turn")
            await first.stop(5.0)
            await written(second)
            assert await count(second, "events") == 1
            await second.stop(5.0)

    asyncio.run(run())
