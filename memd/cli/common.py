"""What every command shares: options, output, exit codes, the way errors end.

Commands import what takes long (pydantic, the HTTP client, model readers) when they run, so that
help and completion answer at once. Results go to stdout, everything said about them to stderr.
"""

import getpass
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from typer.core import TyperGroup

from memd.errors import MemdError, SettingsError
from memd.units import format_size

if TYPE_CHECKING:
    from memd.client import Client


NOTHING = "-"  # what is not known, or does not apply
# Under these names are numbers of something, by what their own names say.
_COUNT = re.compile(r"_(pages|tokens|runs|rows|blocks|files)$")
# Names of values that are shares of one.
_SHARE = re.compile(r"(_ratio|_share|watermark[._](high|low))(_after)?$")


class ExitCode(IntEnum):
    """How a command ended, for scripts."""

    FINE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    UNHEALTHY = 5
    INTERRUPTED = 130


EXIT_CODES = {
    ExitCode.FINE: "fine",
    ExitCode.FAILED: "failed",
    ExitCode.USAGE: "wrong usage: an unknown option, or an invalid setting",
    ExitCode.UNREACHABLE: "no daemon answers at the address",
    ExitCode.REFUSED: "the daemon refused: invalid, stale, unknown, or it is loading or draining",
    ExitCode.UNHEALTHY: "the daemon is not ready (status --check)",
    ExitCode.INTERRUPTED: "interrupted",
}


class Format(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="For people, or for programs.")]
UrlOption = Annotated[
    str,
    typer.Option(
        "--url", envvar="MEMD_URL", help="Of the daemon, or unix:///PATH. Key: MEMD_API_KEY."
    ),
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; kept in the history.")]
DEFAULT_URL = "http://127.0.0.1:8733"


class Commands(TyperGroup):
    """The root command; turns memd's errors into a line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MemdError as error:
            say(f"memd: {error}")
            raise typer.Exit(_exit_code(error)) from None


def _exit_code(error: MemdError) -> ExitCode:
    from memd.client import ClientError, Unreachable

    match error:
        case Unreachable():
            return ExitCode.UNREACHABLE
        case ClientError(status=int(status)) if status < 500 or status == 503:
            return ExitCode.REFUSED
        case SettingsError():
            return ExitCode.USAGE
        case _:
            return ExitCode.FAILED


def connect(url: str, timeout_seconds: float = 30.0) -> "Client":
    """A client of the daemon at `url`; to be used as a context manager.

    The key comes from the environment only: every user of a machine sees the options of a command.
    """
    from memd.client import Client

    return Client(url, os.environ.get("MEMD_API_KEY"), timeout_seconds=timeout_seconds)


def when(seconds: float | None) -> str:
    """A moment, in Unix seconds, as people read it here."""
    if seconds is None:
        return NOTHING
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def who() -> str | None:
    """The user, for the history; None where the system has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None


def say(text: str) -> None:
    """A line about the command, as opposed to its result."""
    typer.echo(text, err=True)


def emit(data: Any, fmt: Format, render: Callable[[], None]) -> None:
    """Print a result: as JSON, or as `render` shows it."""
    if fmt is Format.JSON:
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        render()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Rows under headings. Numbers stand right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    cells = list(rows)
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) for row in cells)
        table.add_column(column, justify="right" if numeric and cells else "left", overflow="fold")
    for row in cells:
        table.add_row(*(show(value) for value in row))
    _print(table)


def print_fields(fields: Mapping[str, object]) -> None:
    """Names and values, one a line; nested mappings by dotted name. Lists are left to JSON."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _flat(fields):
        if not isinstance(value, list):
            table.add_row(name, show(value, name))
    _print(table)


def _print(table: Table) -> None:
    # Piped output is for other programs: no line is broken to fit a screen that is not there.
    console = Console(width=None if sys.stdout.isatty() else 400, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _flat(fields: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def show(value: object, name: str = "") -> str:
    """A value as people read it; the unit is told by the end of its name."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if _COUNT.search(name.rpartition(".")[0]):
            return str(value)
        if "_bytes" in name:
            return format_size(value)
        if _SHARE.search(name):
            return f"{100 * value:.3g}%"
        if name.endswith("_at"):
            return when(value)
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    return str(value) if value != {} else "none"


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for `(bytes done, bytes in all)`, where stderr is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
    with shown(bar):
        task = bar.add_task(title, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


@contextmanager
def count_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for `(done, in all)` of things that are counted."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    with shown(bar):
        task = bar.add_task(title, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


@contextmanager
def shown(drawing: Live | Progress) -> Iterator[None]:
    """Draws it until left; Ctrl-C waits where the terminal is half taken or half given back."""
    try:
        with _interrupts_later():
            drawing.start()
            drawing.refresh()
        yield
    finally:
        with _interrupts_later():
            drawing.stop()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    came: list[int] = []
    # Not a mask: threads that have none would take the signal, and the main one be interrupted.
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
