"""Every test of the store runs on SQLite and on a real PostgreSQL."""

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from history import settled
from postgres import Postgres, binaries, running_postgres

from memd.config_operator import HistorySettings
from memd.store.database import Database, database_of
from memd.store.store import Store

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with running_postgres() as server:
        yield server


@dataclass
class Place:
    """Where a test's database is."""

    directory: Path
    url: str | None
    server: Postgres | None = None
    history: dict[str, Any] = field(default_factory=dict)

    def settings(self, **history: Any) -> HistorySettings:
        return HistorySettings(url=self.url, **{**self.history, **history})

    def database(self) -> Database:
        return database_of(self.settings(), self.directory)

    @asynccontextmanager
    async def store(self, **history: Any) -> AsyncIterator[Store]:
        """A store that has opened its database."""
        store = Store(self.database(), self.settings(**history))
        store.start()
        try:
            await settled(store)
            yield store
        finally:
            await store.stop(10.0)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return Place(tmp_path, None)
    server: Postgres = request.getfixturevalue("postgres")
    return Place(tmp_path, server.create(f"memd{next(_numbers)}"), server)


@pytest.fixture
def sqlite_place(tmp_path: Path) -> Place:
    return Place(tmp_path, None)


@pytest.fixture
def postgres_place(postgres: Postgres, tmp_path: Path) -> Place:
    return Place(tmp_path, postgres.create(f"memd{next(_numbers)}"), postgres)
