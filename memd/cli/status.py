"""`memd status`: what the daemon says of itself."""

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Any

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
from memd.units import parse_duration

if TYPE_CHECKING:
    from memd.client import Client

_LOOK_SECONDS = 0.2


def status(
    check: Annotated[
        bool, typer.Option("--check", help="End with 5 unless the daemon is ready.")
    ] = False,
    wait: Annotated[
        str | None,
        typer.Option(
            "--wait", metavar="DURATION", help="First wait until it is ready, as long as this."
        ),
    ] = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """State, model, requests and pool of the daemon."""
    with connect(url) as client:
        if wait is not None:
            _wait(client, wait)
        answer = client.status()
    emit(answer, fmt, lambda: print_fields(answer))
    if check and answer["state"] != "ready":
        raise typer.Exit(ExitCode.UNHEALTHY)


def _wait(client: "Client", duration: str) -> None:
    """Until it is ready or has failed; nobody there may mean that it is still to come."""
    from memd.client import Unreachable

    try:
        deadline = time.monotonic() + parse_duration(duration)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--wait") from None
    while time.monotonic() < deadline:
        answer: dict[str, Any] = {}
        with contextlib.suppress(Unreachable):
            answer = client.readiness()
        if answer.get("status") in ("ok", "failed"):
            return
        time.sleep(_LOOK_SECONDS)
