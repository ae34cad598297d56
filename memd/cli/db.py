"""`memd db`: the history database itself, with or without a daemon that runs."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memd.cli.common import Format, FormatOption, emit, print_fields, print_table, say
from memd.errors import MemdError

if TYPE_CHECKING:
    from memd.config import Settings
    from memd.store.database import Database

app = typer.Typer(
    help="Look after the history database: upgrade, prune, export.", no_args_is_help=True
)

StateOption = Annotated[Path | None, typer.Option("--state-dir", help="state_dir of the daemon.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", exists=True, dir_okay=False, help="Settings file of the daemon."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Such as history.url; repeatable."),
]
_LOCK_SECONDS = 10.0  # longest that a command waits for others
_READ_SECONDS = 600.0


@app.command()
def status(
    state_dir: StateOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Where it is, its schema and size, and what each table holds."""
    from sqlalchemy.orm import Session

    from memd.store import schema
    from memd.store.reads import summary

    _, database = _named(state_dir, config, assignments)
    with _telling(database), database.reading(time.monotonic() + _READ_SECONDS) as connection:
        found = schema.check(connection)
        answer: dict[str, Any] = {
            "database": database.name,
            "schema": found,
            "newest_schema": schema.HEAD,
            "database_bytes": database.size_bytes(connection),
            "tables": summary(Session(connection)) if found == schema.HEAD else {},
        }
    emit(answer, fmt, lambda: _print_status(answer))


@app.command()
def upgrade(
    state_dir: StateOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Bring it to the newest schema, wholly or not at all. A daemon does so when it starts."""
    from memd.store import schema

    _, database = _named(state_dir, config, assignments)
    with _telling(database), database.open() as connection, connection.begin():
        before = schema.upgrade(connection)
    answer = {"database": database.name, "from": before, "to": schema.HEAD}
    emit(answer, fmt, lambda: print_fields({**answer, "from": before or "empty"}))


@app.command()
def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many rows.")] = False,
    state_dir: StateOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Delete what is older than history.keep_* say, or above trace.limit; give the room back."""
    from memd.store.retention import Prune, count_too_old, cutoffs
    from memd.store.traces import size_cutoff
    from memd.store.writer import TASK_PAUSE_SECONDS

    settings, database = _named(state_dir, config, assignments)
    before = cutoffs(settings.history, time.time())
    with _telling(database):
        _require_schema(database)
        with database.reading(time.monotonic() + _READ_SECONDS) as connection:
            too_much = size_cutoff(connection, settings.trace.limit)
        before["trace_requests"] = max(before["trace_requests"], too_much or 0.0)
        if dry_run:
            with database.reading(time.monotonic() + _READ_SECONDS) as connection:
                deleted = count_too_old(connection, before)
        else:
            task = Prune(before)
            with database.open() as connection:
                while _piece(task, connection):
                    time.sleep(TASK_PAUSE_SECONDS)  # the daemon's turn to write
            deleted = task.deleted
    key = "would_delete_rows" if dry_run else "deleted_rows"
    emit({"database": database.name, key: deleted}, fmt, lambda: print_fields({key: deleted}))


@app.command()
def export(
    table: Annotated[str, typer.Argument(help="Of those that `memd db status` lists.")],
    since: Annotated[
        str | None, typer.Option("--since", help="An age such as 24h, or Unix seconds.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="Likewise; not included.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Instead of JSON lines.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", dir_okay=False, help="Default: stdout.")
    ] = None,
    state_dir: StateOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Write rows of a table, oldest first: one JSON object a line, or CSV."""
    from memd.store.export import export as write
    from memd.store.tables import TABLES

    name = next((each for each in TABLES if each == table), None)
    if name is None:
        raise typer.BadParameter(f"{table!r} is not one of {', '.join(TABLES)}", param_hint="TABLE")
    first, last = _moment(since, "--since"), _moment(until, "--until")
    _, database = _named(state_dir, config, assignments)
    with _telling(database):
        _require_schema(database)
        with database.reading(time.monotonic() + _READ_SECONDS) as connection:
            form: Any = "csv" if as_csv else "jsonl"
            if output is None:
                count = write(connection, name, first, last, form, sys.stdout)
            else:
                with output.open("w", encoding="utf-8", newline="") as file:
                    count = write(connection, name, first, last, form, file)
    say(f"{count} rows of {table}")


def _named(
    state_dir: Path | None, config: Path | None, assignments: list[str] | None
) -> "tuple[Settings, Database]":
    """The settings, and the database that they name."""
    from memd.cli.serve import load_settings
    from memd.config import state_dir as directory_of
    from memd.store.database import database_of

    settings = load_settings(None, None, None, state_dir, config, assignments or []).settings
    return settings, database_of(settings.history, directory_of(settings))


@contextmanager
def _telling(database: "Database") -> Iterator[None]:
    """Errors of the database as memd's own, without statements and values."""
    from sqlalchemy.exc import SQLAlchemyError

    from memd.store.errors import StoreError, cause

    try:
        yield
    except BrokenPipeError:
        raise
    except (SQLAlchemyError, OSError) as error:
        raise StoreError(f"{database.name} cannot be used: {cause(error)}") from None


def _require_schema(database: "Database") -> None:
    from memd.store import schema

    with database.reading(time.monotonic() + _LOCK_SECONDS) as connection:
        found = schema.check(connection)
    if found != schema.HEAD:
        raise MemdError(
            f"the database has the schema {found or 'none'}, this memd uses {schema.HEAD}: run "
            "memd db upgrade"
        )


def _piece(task: Any, connection: Any) -> bool:
    """One piece, tried again while somebody else writes."""
    from sqlalchemy.exc import OperationalError

    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return bool(task.piece(connection))
        except OperationalError:
            if time.monotonic() > deadline:
                raise


def _moment(text: str | None, option: str) -> float | None:
    """Unix seconds of an age, or as they stand."""
    from memd.units import parse_duration

    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return time.time() - parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _print_status(answer: dict[str, Any]) -> None:
    print_fields({key: value for key, value in answer.items() if key != "tables"})
    rows = [
        (name, each["rows"], _date(each["oldest"]), _date(each["newest"]))
        for name, each in answer["tables"].items()
    ]
    if rows:
        say("")
        print_table(("table", "rows", "oldest", "newest"), rows)


def _date(seconds: float | None) -> str:
    from datetime import UTC, datetime

    return "none" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%F %T}Z"
