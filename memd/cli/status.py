"""`memd status`: what the daemon says of itself."""

from typing import Annotated

import typer

from memd.cli.common import (
    DEFAULT_URL,
    ExitCode,
    Format,
    FormatOption,
    UrlOption,
    connect,
    emit,
    print_fields,
)


def status(
    check: Annotated[
        bool, typer.Option("--check", help="End with 5 unless the daemon is ready.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """State, model, requests and pool of the daemon."""
    with connect(url) as client:
        answer = client.status()
    emit(answer, fmt, lambda: print_fields(answer))
    if check and answer["state"] != "ready":
        raise typer.Exit(ExitCode.UNHEALTHY)
