"""Rows for the store, and waiting for it."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import func, select

from memd.store.store import Store
from memd.store.tables import TableName, table


def samples(count: int, start: float = 1000.0, metric: str = "memd_test") -> list[dict[str, Any]]:
    """One sample a second; the value is its number."""
    return [
        {"time": start + at, "metric": metric, "labels": {"part": str(at % 2)}, "value": float(at)}
        for at in range(count)
    ]


async def until(met: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, f"not in {seconds} s"
        await asyncio.sleep(0.01)


async def settled(store: Store) -> None:
    """The database is open, or could not be opened."""
    await until(lambda: store.status()["state"] != "starting")


async def written(store: Store, seconds: float = 60.0) -> None:
    """All rows so far are in the database."""
    await until(lambda: store.queued_rows == 0, seconds)


async def count(store: Store, name: TableName) -> int:
    """Rows of a table."""
    return await store.query(
        lambda session: session.scalar(select(func.count()).select_from(table(name))) or 0
    )


def counted(store: Store, outcome: str) -> int:
    """Rows of all tables that were written, or dropped."""
    return sum(number for (_, how), number in store.row_counts.items() if how == outcome)
