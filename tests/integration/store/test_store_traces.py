"""Recorded traces are kept for a time and up to a size, and what is left is told."""

import asyncio
import time

import pytest
from history import written

from memd.config_operator import HistorySettings
from memd.store.retention import Prune, cutoffs
from memd.store.traces import ROW_BYTES, list_traces, sequences_after, size_cutoff, trace_row


def trace(name, at, ended=True):
    return {
        "id": name,
        "time": at,
        "updated_at": at,
        "ended_at": at if ended else None,
        "kind": "manual",
        "who": "me",
        "reason": "r",
        "dropped": 0,
        "header": {"id": name},
    }


def sequence(name, at, pages=4):
    return {
        "trace_id": name,
        "time": at,
        "request": b"r" * 8,
        "namespace": b"n" * 8,
        "tenant": "",
        "priority": 0,
        "prompt_tokens": 9,
        "output_tokens": 1,
        "max_tokens": 2,
        "outcome": "stop",
        "duration_seconds": 0.5,
        "pages": b"12345678" * pages,
    }


def test_old_sequences_go_and_recordings_with_their_last_one(place):
    now = time.time()

    async def run():
        async with place.store(keep_traces=100.0) as store:
            store.add_rows("traces", [trace("old", now - 300), trace("half", now - 150)])
            store.add_rows("traces", [trace("empty", now - 5)])
            store.add_rows("trace_requests", [sequence("old", now - 300)])
            store.add_rows("trace_requests", [sequence("half", now - at) for at in (150, 50)])
            await written(store)
            deleted = await store.prune()
            assert (deleted["trace_requests"], deleted["traces"]) == (2, 1)
            rows = await store.query(list_traces(10))
            assert [(row["id"], row["sequences"]) for row in rows] == [("empty", 0), ("half", 1)]
            assert rows[1]["size_bytes"] == 32 + ROW_BYTES
            assert await store.query(trace_row("old")) is None

    asyncio.run(run())


def test_the_newest_sequences_that_fit_are_kept(place):
    now = time.time()
    size = 32 + ROW_BYTES

    async def run():
        async with place.store() as store:
            store.add_rows("traces", [trace("t", now)])
            store.add_rows("trace_requests", [sequence("t", now - at) for at in range(10)])
            await written(store)

            async def cutoff(limit):
                return await store.query(lambda session: size_cutoff(session, limit))

            assert await cutoff(10 * size) is None
            found = await cutoff(4 * size + 1)
            assert found is not None
            await store.delete_before({"trace_requests": found})
            rows = await store.query(sequences_after("t", (-1.0, 0), 100))
            assert [round(now - row["time"]) for row in rows] == [3, 2, 1, 0]
            first = (rows[1]["time"], rows[1]["id"])
            assert await store.query(sequences_after("t", first, 100)) == rows[2:]

    asyncio.run(run())


def test_flush_makes_rows_readable_and_tells_when_it_cannot(place):
    async def run():
        async with place.store() as store:
            for number in range(2500):
                store.add_rows("trace_requests", [sequence("t", float(number), 0)])
            await store.flush(("trace_requests",))
            last = await store.query(sequences_after("t", (2498.0, 10**9), 10))
            assert [row["time"] for row in last] == [2499.0]
        with pytest.raises(Exception, match="closed"):
            await store.flush(("trace_requests",))

    asyncio.run(run())


def test_cutoffs_of_traces_follow_their_own_setting():
    before = cutoffs(HistorySettings(keep_traces=60.0), 1000.0)
    assert before["trace_requests"] == before["traces"] == 940.0
    assert list(Prune(before).deleted).index("trace_requests") < list(before).index("traces")
