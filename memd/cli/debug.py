"""`memd debug`: what the daemon's threads do, and faults where `debug.faults` is on."""

from typing import Annotated, Any, get_args

import typer

from memd.cli.common import (
    DEFAULT_URL,
    Format,
    FormatOption,
    UrlOption,
    connect,
    emit,
    print_fields,
)
from memd.units import parse_duration, parse_share

app = typer.Typer(
    help="See where the daemon is stuck; inject faults, if debug.faults is on.",
    no_args_is_help=True,
)


@app.command()
def faults(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """What is armed, and how often it has happened."""
    with connect(url) as client:
        answer = client.faults()
    emit(answer, fmt, lambda: print_fields(answer))


@app.command()
def inject(
    request: Annotated[
        list[str] | None,
        typer.Option("--request", metavar="ID=nan|error|hang|kill", help="*: any request."),
    ] = None,
    delay_copies: Annotated[
        str | None, typer.Option("--delay-copies", metavar="DURATION", help="Between tiers.")
    ] = None,
    fail_write_backs: Annotated[
        str | None, typer.Option("--fail-write-backs", metavar="SHARE", help="To the host.")
    ] = None,
    fail_restores: Annotated[
        str | None, typer.Option("--fail-restores", metavar="SHARE", help="From the host.")
    ] = None,
    delay_files: Annotated[
        str | None, typer.Option("--delay-files", metavar="DURATION", help="On disk.")
    ] = None,
    fail_file_writes: Annotated[
        str | None, typer.Option("--fail-file-writes", metavar="SHARE", help="To disk.")
    ] = None,
    fail_file_reads: Annotated[
        str | None, typer.Option("--fail-file-reads", metavar="SHARE", help="From disk.")
    ] = None,
    tear_files: Annotated[
        str | None, typer.Option("--tear-files", metavar="SHARE", help="Lose their second half.")
    ] = None,
    disk_full: Annotated[
        bool, typer.Option("--disk-full", help="Nothing can be written to disk.")
    ] = False,
    fail_commits: Annotated[
        int | None, typer.Option("--fail-commits", min=0, help="So many blocks get no memory.")
    ] = None,
    nan_in_free_pages: Annotated[
        bool, typer.Option("--nan-in-free-pages", help="Whatever nobody has written is NaN.")
    ] = False,
    step_clock: Annotated[
        str | None, typer.Option("--step-clock", metavar="DURATION", help="Ahead, once.")
    ] = None,
    moves: Annotated[
        str | None,
        typer.Option("--moves", metavar="error|kill", help="Of pages within the pool."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of which copies fail.")] = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Arm these faults, and disarm all others."""
    plan = {
        "requests": dict(_split(each) for each in request or []) or None,
        "delay_copies_seconds": _parsed("--delay-copies", parse_duration, delay_copies),
        "fail_write_backs": _parsed("--fail-write-backs", parse_share, fail_write_backs),
        "fail_restores": _parsed("--fail-restores", parse_share, fail_restores),
        "delay_files_seconds": _parsed("--delay-files", parse_duration, delay_files),
        "fail_file_writes": _parsed("--fail-file-writes", parse_share, fail_file_writes),
        "fail_file_reads": _parsed("--fail-file-reads", parse_share, fail_file_reads),
        "tear_files": _parsed("--tear-files", parse_share, tear_files),
        "disk_full": disk_full or None,
        "fail_commits": fail_commits,
        "nan_in_free_pages": nan_in_free_pages or None,
        "step_clock_seconds": _parsed("--step-clock", parse_duration, step_clock),
        "moves": moves,
        "seed": seed,
    }
    with connect(url) as client:
        answer = client.arm_faults({key: each for key, each in plan.items() if each is not None})
    emit(answer, fmt, lambda: print_fields(answer))


@app.command()
def clear(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """Disarm every fault."""
    with connect(url) as client:
        answer = client.arm_faults({})
    emit(answer, fmt, lambda: print_fields(answer))


@app.command()
def stacks(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """Have the daemon log what all its threads and tasks do now, as SIGUSR1 does."""
    with connect(url) as client:
        answer = client.write_stacks()
    emit(answer, fmt, lambda: print_fields(answer))


def _parsed(option: str, parse: Any, text: str | None) -> Any:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _split(assignment: str) -> tuple[str, str]:
    from memd.faults import RequestFault

    request_id, equals, fault = assignment.rpartition("=")
    if not equals or fault not in get_args(RequestFault):
        known = ", ".join(get_args(RequestFault))
        raise typer.BadParameter(
            f"{assignment!r} is not ID=FAULT, with a fault of {known}", param_hint="--request"
        )
    return request_id, fault
