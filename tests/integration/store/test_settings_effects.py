"""Figures before and after a change of settings, from the samples."""

import asyncio
import time

import pytest

from memd.api.settings_effects import SettingsEffects, measured
from memd.config_operator import HistorySettings
from memd.settings_history import Revision
from memd.store.database import database_of
from memd.store.store import Store

TTFT = "model:memd_time_to_first_token_seconds:p95_rate5m"
GAP = "model:memd_inter_token_latency_seconds:p95_rate5m"
DIRECT = "gpu:memd_direct_reclaim:ratio_rate5m"
OCCUPIED = "memd_pool_occupied_ratio"
AT = 10_000.0


def revision(number, at=AT, kind="change"):
    return Revision(number, at, "ann", "peaks", kind, {})


def test_records_are_read_where_they_cover_just_the_window():
    points = [
        (AT - 20.0, TTFT, 0.5),
        (AT - 5.0, TTFT, 0.4),  # the last before: covers the five minutes before
        (AT + 10.0, TTFT, 9.0),  # mixes both
        (AT + 301.0, TTFT, 0.2),  # the first that lies wholly after
        (AT + 316.0, TTFT, 0.9),
        (AT - 5.0, DIRECT, 0.3),
        (AT - 299.0, OCCUPIED, 0.9),
        (AT - 1.0, OCCUPIED, 0.8),
        (AT + 1.0, OCCUPIED, 0.6),
        (AT + 305.0, OCCUPIED, 0.1),
    ]
    found = measured(points, AT, AT + 400, 60.0)
    assert found["window_seconds"] == 300
    assert found["before"] == {
        "time_to_first_token_p95_seconds": 0.4,
        "inter_token_latency_p95_seconds": None,
        "direct_reclaim_ratio": 0.3,
        "occupied_ratio": pytest.approx(0.85),
    }
    assert found["after"] == {
        "time_to_first_token_p95_seconds": 0.2,
        "inter_token_latency_p95_seconds": None,
        "direct_reclaim_ratio": None,
        "occupied_ratio": pytest.approx(0.6),
    }


def test_without_traffic_figures_are_unknown_and_until_it_is_over_there_are_none():
    quiet = measured([], AT, AT + 400, 60.0)
    assert set(quiet["before"].values()) == set(quiet["after"].values()) == {None}
    assert measured([], AT, AT + 299, 60.0)["after"] is None
    old = measured([(AT - 61.0, TTFT, 0.5)], AT, AT + 400, 60.0)
    assert old["before"]["time_to_first_token_p95_seconds"] is None


def run(tmp_path, clock, body):
    async def main():
        settings = HistorySettings()
        store = Store(database_of(settings, tmp_path), settings)
        store.start()
        try:
            return await body(store, SettingsEffects(store, 15.0, clock))
        finally:
            await store.stop(5.0)

    return asyncio.run(main())


async def add(store, *rows):
    names = ("time", "metric", "value", "labels")
    store.add_rows("samples", [dict(zip(names, (*row, {}), strict=True)) for row in rows])

    def written():
        while store.queued_rows:
            time.sleep(0.01)

    await asyncio.to_thread(written)


def test_a_revision_is_read_again_until_it_is_over_and_then_kept(tmp_path):
    now = [AT + 10]

    async def body(store, effects):
        await add(store, (AT - 1, TTFT, 0.4))
        first = await effects.of([revision(1, kind="start"), revision(2)])
        assert list(first) == [2], "a start changes nothing"
        assert first[2]["before"]["time_to_first_token_p95_seconds"] == 0.4
        assert first[2]["after"] is None
        now[0] = AT + 320
        await add(store, (AT + 305, TTFT, 0.1))
        assert (await effects.of([revision(2)]))[2]["after"][
            "time_to_first_token_p95_seconds"
        ] == 0.1
        now[0] = AT + 400
        await effects.of([revision(2)])
        await add(store, (AT + 301, TTFT, 7.0))  # too late to matter
        now[0] = AT + 4000
        kept = (await effects.of([revision(2)]))[2]["after"]
        assert kept["time_to_first_token_p95_seconds"] == 0.1

    run(tmp_path, lambda: now[0], body)


def test_a_database_that_fails_leaves_figures_out(tmp_path):
    async def body(store, effects):
        await store.stop(1.0)
        assert await effects.of([revision(2)]) == {}

    run(tmp_path, lambda: AT, body)
