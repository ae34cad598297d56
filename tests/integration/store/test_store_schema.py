"""Migrations: from nothing, from the schema before, and never halfway."""

import asyncio
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from history import written
from sqlalchemy import inspect, text

from memd.store import schema
from memd.store.errors import SchemaError
from memd.store.reads import rows_of
from memd.store.tables import TABLES, Base

OLD_ROW = """
INSERT INTO settings_revisions (revision, time, who, reason, kind, changes)
VALUES (7, 5.0, 'ada', 'why', 'change', '{"engine.max_waiting": {"old": 1, "new": 2}}')
"""


def test_the_list_of_revisions_is_that_of_the_files():
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).parent / "migrations"))
    found = [each.revision for each in ScriptDirectory.from_config(config).walk_revisions()]
    assert tuple(reversed(found)) == schema.REVISIONS


def test_from_nothing_the_schema_is_what_the_tables_say(place):
    with place.database().open() as connection, connection.begin():
        assert schema.upgrade(connection) is None
        assert schema.revision_of(connection) == schema.HEAD
        # What SQLite tells of a column's type is another word for it.
        types = connection.dialect.name != "sqlite"
        context = MigrationContext.configure(connection, opts={"compare_type": types})
        assert compare_metadata(context, Base.metadata) == []
        assert set(inspect(connection).get_table_names()) == {*TABLES, "alembic_version"}


@pytest.mark.parametrize("old", schema.REVISIONS[:-1])
def test_from_each_schema_before_rows_stay(place, old):
    with place.database().open() as connection, connection.begin():
        schema.upgrade(connection, old)
        connection.execute(text(OLD_ROW))

    async def run():
        async with place.store() as store:
            [row], _ = await store.query(rows_of("settings_revisions"))
            assert row["revision"] == 7
            assert row["changes"] == {"engine.max_waiting": {"old": 1, "new": 2}}
            assert row["persist"] is False
            assert row["confirm_by"] is None
            store.add_event("after", "")
            await written(store)
            assert store.status()["failure"] is None

    asyncio.run(run())


def test_an_upgrade_twice_changes_nothing(place):
    with place.database().open() as connection, connection.begin():
        schema.upgrade(connection)
        assert schema.upgrade(connection) == schema.HEAD


def test_an_upgrade_that_fails_leaves_the_schema_of_before(place):
    with place.database().open() as connection:
        with connection.begin():
            schema.upgrade(connection, "0001")
            # In the way of the second revision, after some of its work.
            connection.execute(text("CREATE INDEX ix_job_runs_job_time ON job_runs (job)"))
        with pytest.raises(Exception, match="already exists"), connection.begin():
            schema.upgrade(connection)
        with connection.begin():
            assert schema.revision_of(connection) == "0001"
            names = {each["name"] for each in inspect(connection).get_indexes("events")}
            assert names == {"ix_events_time"}


def test_a_newer_schema_is_refused(place):
    with place.database().open() as connection:
        with connection.begin():
            schema.upgrade(connection)
            connection.execute(text("UPDATE alembic_version SET version_num = '0999'"))
        with (
            pytest.raises(SchemaError, match=rf"schema 0999.*up to {schema.HEAD}"),
            connection.begin(),
        ):
            schema.upgrade(connection)
