"""`memd pool`: see the pool, and act on it."""

import time
from typing import Annotated, Any

import typer
from rich.console import Console

from memd.cli.common import (
    DEFAULT_URL,
    ExitCode,
    Format,
    FormatOption,
    UrlOption,
    connect,
    emit,
    print_fields,
    when,
)
from memd.units import parse_duration

app = typer.Typer(help="See the pool; reclaim, defrag, flush and audit it.", no_args_is_help=True)
_LOOK_SECONDS = 0.2


@app.command()
def show(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """Layout and counts."""
    with connect(url) as client:
        answer = client.pool()
    emit(answer, fmt, lambda: print_fields(answer))


@app.command("map")
def map_(
    back: Annotated[
        str | None, typer.Option("--back", metavar="DURATION", help="As it was then, such as 5m.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """What each block holds, as a picture."""
    from memd.cli.block_map import draw

    try:
        at = None if back is None else max(0.0, time.time() - parse_duration(back))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--back") from None
    with connect(url) as client:
        answer = client.all_blocks(at)

    def show() -> None:
        Console().print(draw(answer["columns"]), soft_wrap=True)
        if at is not None:
            typer.echo(f"as it was at {when(answer['time'])}")

    emit(answer, fmt, show)


@app.command()
def reclaim(
    pages: Annotated[
        int | None, typer.Option("--pages", min=1, help="Default: down to the low mark.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Evict cached pages, oldest first."""
    with connect(url) as client:
        answer = client.reclaim(pages)
    emit(answer, fmt, lambda: print_fields(answer))


@app.command()
def flush(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """Evict every cached page. Running sequences keep theirs."""
    with connect(url) as client:
        answer = client.flush()
    emit(answer, fmt, lambda: print_fields(answer))


@app.command()
def defrag(
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="For the run to end, and tell what it did.")
    ] = True,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Move pages together, so that whole blocks become empty and can go back to the device."""
    with connect(url) as client:
        answer = client.defrag()
        while wait and answer["running"]:
            time.sleep(_LOOK_SECONDS)
            pool = client.pool()
            run = pool["defrag_last_run"] or {}
            ratio = pool["fragmentation_ratio"]
            answer |= {**run, "running": pool["defrag_running"], "fragmentation_ratio": ratio}
    emit(answer, fmt, lambda: print_fields(answer))
    if answer.get("failed"):
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def audit(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """Recount everything from the sequences and the tree. Leaks are repaired, and end with 1."""
    with connect(url) as client:
        answer = client.audit()
    emit(answer, fmt, lambda: _print_audit(answer))
    if not answer["clean"]:
        raise typer.Exit(ExitCode.FAILED)


def _print_audit(answer: dict[str, Any]) -> None:
    print_fields(answer)
    for problem in answer["problems"]:
        typer.echo(problem)
