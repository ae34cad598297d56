"""Writing out a table or a part of it, as JSON lines or CSV, oldest rows first."""

import csv
import json
from collections.abc import Iterator
from typing import Any, Literal, TextIO

from sqlalchemy import Connection, select, tuple_

from memd.store.tables import TableName, table

ExportFormat = Literal["jsonl", "csv"]
_CHUNK_ROWS = 5000


def export(
    connection: Connection,
    name: TableName,
    since: float | None,
    until: float | None,
    form: ExportFormat,
    out: TextIO,
) -> int:
    """Write rows of a table.

    Args:
        connection: In a transaction, so that what is written is of one moment.
        name: Of the table.
        since: Unix seconds; not older. None: from the first.
        until: Unix seconds; older. None: to the last.
        form: JSON lines: one object a line. CSV: a heading, and JSON in cells that hold objects.
            Bytes are hexadecimal.
        out: Where to.

    Returns:
        How many rows were written.
    """
    columns = [column.name for column in table(name).columns]
    sheet = csv.writer(out, lineterminator="\n")
    if form == "csv":
        sheet.writerow(columns)
    count = 0
    for row in _rows(connection, name, since, until):
        if form == "csv":
            sheet.writerow([_cell(row[column]) for column in columns])
        else:
            out.write(json.dumps(row, ensure_ascii=False, default=bytes.hex) + "\n")
        count += 1
    return count


def _rows(
    connection: Connection, name: TableName, since: float | None, until: float | None
) -> Iterator[dict[str, Any]]:
    """Chunk by chunk, from where the one before ended: no database holds all of it in memory."""
    columns = table(name).c
    key = next(iter(table(name).primary_key))
    query = select(table(name)).order_by(columns.time, key).limit(_CHUNK_ROWS)
    if since is not None:
        query = query.where(columns.time >= since)
    if until is not None:
        query = query.where(columns.time < until)
    chunk = connection.execute(query).mappings().all()
    while chunk:
        yield from map(dict, chunk)
        after = tuple_(chunk[-1]["time"], chunk[-1][key.name])
        chunk = connection.execute(query.where(tuple_(columns.time, key) > after)).mappings().all()


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bytes):
        return value.hex()
    return "" if value is None else value
