"""The queue, without a database behind it."""

import time

from memd.config_operator import HistorySettings
from memd.store.database import database_of
from memd.store.store import Store
from memd.store.tables import TABLES


def queue(tmp_path, rows):
    """A store that has not been started: rows only wait."""
    settings = HistorySettings(queue_rows=rows)
    return Store(database_of(settings, tmp_path), settings)


def test_adding_a_row_costs_less_than_5_microseconds(tmp_path, record_property):
    """Processor time: what other programs do on the machine is not its cost."""
    number = 50_000
    row = {"time": 1.0, "metric": "memd_x", "labels": {}, "value": 1.0}
    costs = {}
    for name, rows, limit in (
        ("one by one", 1, 2 * number),
        ("by the hundred", 100, 2 * number),
        ("into a full queue", 1, 100),
    ):
        store = queue(tmp_path, limit)
        store.add_rows("samples", [row] * 100)
        batch = [row] * rows
        before = time.thread_time()
        for _ in range(number // rows):
            store.add_rows("samples", batch)
        costs[name] = (time.thread_time() - before) / number * 1e6
    record_property("table", "µs a row: " + ", ".join(f"{k} {v:.2f}" for k, v in costs.items()))
    assert costs["one by one"] < 5
    assert costs["into a full queue"] < 10
    assert costs["by the hundred"] < 1


def test_the_oldest_rows_of_the_fullest_table_give_way(tmp_path):
    store = queue(tmp_path, 100)
    store.add_event("first", "stays")
    for number in range(300):
        store.add_rows("samples", [{"time": float(number)}])
    assert store.queued_rows == 100
    assert store.row_counts["samples", "dropped"] == 201
    assert store.row_counts["events", "dropped"] == 0


def test_every_table_is_counted_from_the_start(tmp_path):
    counts = queue(tmp_path, 100).row_counts
    assert set(counts) == {(name, how) for name in TABLES for how in ("written", "dropped")}
    assert set(counts.values()) == {0}
