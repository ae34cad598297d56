"""`memd dashboard`: the pages for the operator, in a process of its own."""

import os
import signal
import socket
import subprocess
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

from memd.cli.common import DEFAULT_URL, ExitCode, UrlOption, say

PORT = 8501
_STOP_SECONDS = 5.0
_KEYS = ("MEMD_API_KEY", "MEMD_API_KEY_FILE")


def dashboard(
    url: UrlOption = DEFAULT_URL,
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = PORT,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file", exists=True, dir_okay=False, help="Holds the API key; or MEMD_API_KEY."
        ),
    ] = None,
    base_path: Annotated[
        str,
        typer.Option("--base-path", help="The path under which a proxy offers it, such as /memd."),
    ] = "",
) -> None:
    """Show the daemon in a browser until a signal comes.

    The key of the environment serves everyone who can open the page, so it is used on loopback
    only; elsewhere each viewer gives a key of their own.
    """
    require_extra()
    base_path = base_path.strip("/")
    process = start(url, host, port, key_file, base_path)
    say(f"memd dashboard at {address(host, port, base_path)}, of the daemon at {url}")

    def end(number: int, frame: types.FrameType | None) -> None:
        process.terminate()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    code = process.wait()
    if code not in (0, -signal.SIGTERM, -signal.SIGINT):
        say(f"memd: the dashboard ended with code {code}; is port {port} free?")
        raise typer.Exit(ExitCode.FAILED)


@contextmanager
def beside(url: str, wanted: bool) -> Iterator[str | None]:
    """Run the dashboard of a daemon while something else runs.

    Args:
        url: Of the daemon.
        wanted: Without it, or without the extra `dashboard`, nothing is started.

    Returns:
        Where a browser finds it; None: it was not started.
    """
    if not wanted or not is_installed():
        yield None
        return
    port = _free_port()
    process = start(url, port=port)
    try:
        yield address("127.0.0.1", port)
    finally:
        stop(process)


def _free_port() -> int:
    """The usual port, or any other that is free when something listens there."""
    for port in (PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    return PORT


def is_installed() -> bool:
    """Whether the extra `dashboard` is there."""
    return find_spec("streamlit") is not None


def require_extra() -> None:
    """End the command with what to install, when it is missing."""
    if not is_installed():
        say("memd: the dashboard needs Streamlit: pip install 'memd-kv[dashboard]'")
        raise typer.Exit(ExitCode.FAILED)


def start(
    url: str,
    host: str = "127.0.0.1",
    port: int = PORT,
    key_file: Path | None = None,
    base_path: str = "",
) -> subprocess.Popen[bytes]:
    """Start Streamlit; its own words go to stderr, and end up nowhere when they are of no use."""
    from memd_dashboard.launch import command

    environment = {**os.environ, "MEMD_URL": url}
    if key_file is not None:
        environment["MEMD_API_KEY_FILE"] = str(key_file.absolute())
    if not _is_loopback(host):
        environment = {name: value for name, value in environment.items() if name not in _KEYS}
    return subprocess.Popen(
        command(host, port, base_path), env=environment, stdout=subprocess.DEVNULL
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End it, by force when it does not go."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def address(host: str, port: int, base_path: str = "") -> str:
    """Where a browser finds it."""
    root = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return f"{root}/{base_path}" if base_path else root


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
