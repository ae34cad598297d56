"""`memd top`: the daemon as it is now, in the terminal, refreshed until told to end."""

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from memd.cli.common import DEFAULT_URL, Format, FormatOption, UrlOption, connect, emit, shown
from memd.cli.top_screen import Frame, Screen, rates_between
from memd.units import parse_duration

if TYPE_CHECKING:
    from memd.client import Client

_TIMEOUT_SECONDS = 3.0
_LEAST_SECONDS = 0.2
_UNTIL_TOLD_SECONDS = 3600.0
_REFRESHES_PER_SECOND = 4  # also how soon a new size of the terminal is drawn


def top(
    every: Annotated[
        str, typer.Option("--every", metavar="DURATION", help="Between two looks.")
    ] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Look twice, print, and end.")] = False,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """State, pool, requests, speed and alerts of the daemon, live; q or Ctrl-C ends it.

    Speed is what happened between two looks. JSON goes with --once.
    """
    seconds = _interval(every)
    if fmt is Format.JSON and not once:
        raise typer.BadParameter("json goes with --once", param_hint="--format")
    console = Console(highlight=False)
    if not once and (not console.is_terminal or console.is_dumb_terminal):
        raise typer.BadParameter("this is no terminal that can be redrawn", param_hint="--once")
    with connect(url, timeout_seconds=_TIMEOUT_SECONDS) as client:
        frame = look(client, None)
        if once:
            time.sleep(seconds)
            frame = look(client, frame)
            emit(frame.as_json(), fmt, lambda: _print(frame))
            return
        _follow(client, console, frame, seconds)


def look(client: "Client", before: Frame | None) -> Frame:
    """Ask the daemon.

    Args:
        client: Of the daemon.
        before: The look before, for rates; shown on when the daemon does not answer now.

    Raises:
        ClientError: the daemon refuses, or does not answer and there is nothing to show yet.
    """
    from memd.client import ClientError, Unreachable

    def ask(call: Any, name: str | None = None) -> Any:
        """What it answers; None while it has none: it loads, or keeps no alerts."""
        try:
            answer = call()
        except Unreachable:
            raise
        except ClientError as error:
            if error.status in (404, 409, 503):
                return None
            raise
        return answer if name is None else answer[name]

    at = time.time()
    try:
        status = client.status()
        alerts = ask(client.alerts, "alerts")
        if alerts is not None:
            alerts = [each for each in alerts if each["state"] != "resolved"]
        frame = Frame(
            *(at, client.base_url, status, ask(client.pool), ask(client.requests, "requests")),
            alerts,
        )
    except ClientError as error:
        gone = isinstance(error, Unreachable) or (error.status or 0) >= 500
        if before is None or not gone:
            raise
        return replace(before, rates=None, unreachable_since=before.unreachable_since or at)
    return frame if before is None else replace(frame, rates=rates_between(before, frame))


def _follow(client: "Client", console: Console, frame: Frame, seconds: float) -> None:
    live = Live(
        Screen(frame),
        console=console,
        screen=True,
        refresh_per_second=_REFRESHES_PER_SECOND,
        vertical_overflow="crop",
    )
    with _single_keys() as wait_for_key, shown(live):
        while wait_for_key(seconds) not in ("q", "Q"):
            frame = look(client, frame)
            live.update(Screen(frame))


def _print(frame: Frame) -> None:
    # Piped output is for other programs: no line is broken to fit a screen that is not there.
    width = None if sys.stdout.isatty() else 120
    height = 12 + len(frame.requests or []) + len(frame.alerts or [])
    Console(width=width, height=height, highlight=False).print(Screen(frame, hint=""))


def _interval(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--every") from None
    if not _LEAST_SECONDS <= seconds <= _UNTIL_TOLD_SECONDS:
        limits = f"{_LEAST_SECONDS:g}s to {_UNTIL_TOLD_SECONDS:g}s"
        raise typer.BadParameter(f"{text} is not within {limits}", param_hint="--every")
    return seconds


@contextmanager
def _single_keys() -> Iterator[Any]:
    """Gives a function that waits for a key, without Enter: the key, or None in time."""
    if not sys.stdin.isatty():
        yield time.sleep
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()

    def wait(seconds: float) -> str | None:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode(errors="replace") if ready else None

    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
