"""One statement for the rows of one table, the same on SQLite and PostgreSQL."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, Insert
from sqlalchemy.dialects import postgresql, sqlite

from memd.store.tables import KEYED, TableName, table


def insert(connection: Connection, name: TableName, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows; columns that a row leaves out are null.

    Raises:
        ValueError: a row names a column that is not there.
        sqlalchemy.exc.SQLAlchemyError, TypeError, OverflowError: the database refuses a row.
    """
    # Other tables' ids are made up by the database.
    columns = [each.name for each in table(name).columns if name in KEYED or each.name != "id"]
    wrong = {key for row in rows for key in row} - set(columns)
    if wrong:
        raise ValueError(f"{name} has no column {min(wrong)}")
    statement = _statement(name, connection.dialect.name)
    connection.execute(statement, [{key: row.get(key) for key in columns} for row in rows])


@cache
def _statement(name: TableName, dialect: str) -> Insert:
    make = sqlite.insert if dialect == "sqlite" else postgresql.insert
    statement = make(table(name))
    if name not in KEYED:
        return statement
    keys = [column.name for column in table(name).primary_key]
    replaced = {
        column.name: statement.excluded[column.name]
        for column in table(name).columns
        if column.name not in keys
    }
    return statement.on_conflict_do_update(index_elements=keys, set_=replaced)
