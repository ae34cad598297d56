"""`memd trace`: record traffic without its text, and look at what was recorded."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memd.cli.common import (
    DEFAULT_URL,
    Format,
    FormatOption,
    ReasonOption,
    UrlOption,
    connect,
    emit,
    print_fields,
    print_table,
    say,
    when,
    who,
)
from memd.errors import MemdError

if TYPE_CHECKING:
    from memd.client import Client

app = typer.Typer(
    help="Record traffic for the simulator: times, lengths and digests, never text.",
    no_args_is_help=True,
)
_Trace = Annotated[
    str | None, typer.Argument(metavar="[ID]", help="As `memd trace list` has it. Default: newest.")
]


@app.command()
def start(
    reason: ReasonOption = "recorded by hand",
    tenant_names: Annotated[
        bool, typer.Option("--tenant-names", help="Tenants by name, instead of as digests.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Begin a recording. One goes on at a time; trace.record has one go on always."""
    with connect(url) as client:
        answer = client.start_trace(reason, tenant_names=tenant_names, who=who())
    emit(answer, fmt, lambda: print_fields(_dated(answer)))


@app.command()
def stop(
    reason: ReasonOption = "stopped by hand",
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """End the recording that was started; what is still open is part of it."""
    with connect(url) as client:
        answer = client.stop_trace(reason, who=who())
    emit(answer, fmt, lambda: print_fields(_dated(answer)))


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000)] = 100,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Recordings that are kept, newest first."""
    with connect(url) as client:
        answer = client.traces(limit)
    columns = ("id", "state", "kind", "started", "ended", "sequences", "dropped", "by", "reason")
    emit(answer, fmt, lambda: print_table(columns, (_row(each) for each in answer["traces"])))


@app.command()
def export(
    trace_id: _Trace = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", dir_okay=False, help="Default: stdout.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Write a trace as JSON lines: a header, then a line for each sequence."""
    with connect(url) as client:
        pieces = client.export_trace(_named(client, trace_id))
        if output is None:
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            sys.stdout.flush()
            return
        try:
            _write(pieces, output)
        except OSError as error:
            raise MemdError(f"{output} cannot be written: {error.strerror}") from None
    say(f"written to {output}")


@app.command()
def show(
    trace: Annotated[
        str | None, typer.Argument(metavar="[FILE|ID]", help="Default: the newest of the daemon.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Length, rate, lengths of prompts and outputs, and how much of it could be reused."""
    from memd.simulate.trace import read_trace
    from memd.simulate.trace_summary import summarise

    with _as_file(trace, url) as path:
        summary = summarise(*read_trace(path))
    emit(summary, fmt, lambda: print_fields(_dated(summary)))


@contextmanager
def _as_file(trace: str | None, url: str) -> Iterator[Path]:
    """The trace of that file, or fetched from the daemon."""
    if trace is not None and Path(trace).is_file():
        yield Path(trace)
        return
    if trace is not None and (os.sep in trace or trace.endswith(".jsonl")):
        raise MemdError(f"{trace} does not exist")
    with tempfile.TemporaryDirectory(prefix="memd-") as directory, connect(url) as client:
        trace_id = _named(client, trace)
        path = Path(directory) / trace_id
        _write(client.export_trace(trace_id), path)
        yield path


def _write(pieces: Iterator[bytes], path: Path) -> None:
    """Under its own name only when it is whole."""
    partial = path.with_name(f"{path.name}.part")
    try:
        with partial.open("wb") as file:
            for piece in pieces:
                file.write(piece)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _named(client: "Client", trace_id: str | None) -> str:
    if trace_id is not None:
        return trace_id
    newest: list[dict[str, Any]] = client.traces(1)["traces"]
    if not newest:
        raise MemdError("no trace has been recorded: memd trace start")
    return str(newest[0]["id"])


def _dated(answer: dict[str, Any]) -> dict[str, Any]:
    times = {"started_at": when(answer["started_at"])}
    times["ended_at"] = "not yet" if answer["ended_at"] is None else when(answer["ended_at"])
    return {**answer, **times}


def _row(trace: dict[str, Any]) -> tuple[object, ...]:
    return (
        trace["id"],
        trace["state"],
        trace["kind"],
        when(trace["started_at"]),
        "" if trace["ended_at"] is None else when(trace["ended_at"]),
        trace["sequences"],
        trace["dropped"],
        trace["who"],
        trace["reason"],
    )
