"""`memd requests`: the open requests of the daemon."""

from typing import Annotated, Any

import typer

from memd.cli.common import (
    DEFAULT_URL,
    Format,
    FormatOption,
    UrlOption,
    connect,
    emit,
    print_fields,
    print_table,
)

app = typer.Typer(help="List, show, cancel and reorder open requests.", no_args_is_help=True)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="As `memd requests list` shows it.")]
OptionalReason = Annotated[str | None, typer.Option("--reason", help="Kept in the events.")]


@app.command("list")
def list_command(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """The open requests."""
    with connect(url) as client:
        answer = client.requests()
    emit(answer, fmt, lambda: _print(answer["requests"]))


@app.command()
def show(
    request_id: IdArgument, url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE
) -> None:
    """The sequences of one open request."""
    with connect(url) as client:
        answer = client.request(request_id)
    emit(answer, fmt, lambda: _print(answer["sequences"]))


@app.command()
def cancel(
    request_id: IdArgument,
    reason: OptionalReason = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """End a request; its client gets an error that says so."""
    with connect(url) as client:
        answer = client.cancel(request_id, reason)
    emit(answer, fmt, lambda: print_fields(answer))


@app.command()
def priority(
    request_id: IdArgument,
    value: Annotated[int, typer.Argument(metavar="PRIORITY", help="Lower goes first.")],
    reason: OptionalReason = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Move an open request in the order of those that wait and of those that give way."""
    with connect(url) as client:
        answer = client.set_priority(request_id, value, reason)
    emit(answer, fmt, lambda: print_fields(answer))


def _print(rows: list[dict[str, Any]]) -> None:
    """A table of whatever the engine and the api know of each sequence."""
    columns = list(dict.fromkeys(name for row in rows for name in row)) or ["id"]
    columns = [name for name in columns if name != "attention_shares"]  # long; JSON has it
    print_table(columns, ([row.get(name) for name in columns] for row in rows))
