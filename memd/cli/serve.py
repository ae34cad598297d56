"""`memd serve` and `memd up`: the daemon in the foreground."""

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from memd.cli.common import ExitCode, connect
from memd.imports import kept

if TYPE_CHECKING:
    from memd.config import Settings
    from memd.config_sources import Loaded

ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Directory, GGUF file, hub name or demo name: model.path."),
]
PortOption = Annotated[int | None, typer.Option("--port", help="server.port; 0: any free one.")]
HostOption = Annotated[str | None, typer.Option("--host", help="server.host.")]
StateOption = Annotated[Path | None, typer.Option("--state-dir", help="state_dir.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", exists=True, dir_okay=False, help="Settings file, YAML or TOML."),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; repeatable.")
]

_POLL_SECONDS = 0.2


def serve(
    model: ModelOption = None,
    port: PortOption = None,
    host: HostOption = None,
    state_dir: StateOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Serve a model until a signal comes. Settings: defaults, file, MEMD_* variables, options."""
    loaded = load_settings(model, port, host, state_dir, config, assignments or [])
    raise typer.Exit(_run(loaded, greet=False))


def up(
    model: ModelOption = None,
    port: PortOption = None,
    host: HostOption = None,
    state_dir: StateOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    dashboard: Annotated[bool, typer.Option(help="Start the dashboard too.")] = True,
) -> None:
    """Like serve, but fetches the demo model first, starts the dashboard, shows what to try."""
    from memd.cli.dashboard import beside
    from memd.cli.models import fetch_model
    from memd.models.hub import DEMO_MODELS

    loaded = load_settings(model, port, host, state_dir, config, assignments or [])
    settings = loaded.settings
    url = _url(settings)
    if _is_known(settings) and (running := _version_at(url)) is not None:
        typer.echo(f"memd {running} already answers at {url}")
        return
    if settings.model.path in DEMO_MODELS:
        fetch_model(settings.model.path)
    with beside(url, wanted=dashboard and _is_known(settings)) as dashboard_url:
        raise typer.Exit(_run(loaded, greet=True, dashboard_url=dashboard_url))


def load_settings(
    model: str | None,
    port: int | None,
    host: str | None,
    state_dir: Path | None,
    config: Path | None,
    assignments: list[str],
) -> "Loaded":
    """All sources of settings, the options last.

    Raises:
        SettingsError: a source cannot be read, or keys or values are invalid.
    """
    from memd.config_sources import Sources

    options = {
        "model.path": model,
        "server.port": port,
        "server.host": host,
        "state_dir": str(state_dir) if state_dir else None,
    }
    shorthands = [f"{k}={json.dumps(v)}" for k, v in options.items() if v is not None]
    file = config.absolute() if config is not None else None  # it is read again later
    return Sources(file, [*assignments, *shorthands]).read()


def _run(loaded: "Loaded", greet: bool, dashboard_url: str | None = None) -> int:
    with kept():
        from memd.daemon import serve as serve_forever

    # The daemon logs for its operator; that its start is watched is no news.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    # The port is not known beforehand when the system is to choose it; the daemon prints it.
    known = _is_known(loaded.settings)
    with _following(loaded.settings, greet, dashboard_url) if known else nullcontext():
        return serve_forever(loaded)


@contextmanager
def _following(settings: "Settings", greet: bool, dashboard_url: str | None) -> Iterator[None]:
    """Show the start of the daemon that runs inside, from a thread that asks it over HTTP."""
    ended = threading.Event()
    thread = threading.Thread(
        target=_follow, args=(settings, greet, dashboard_url, ended), name="follow"
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(
    settings: "Settings", greet: bool, dashboard_url: str | None, ended: threading.Event
) -> None:
    from memd.client import Client, ClientError

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())
    with Client(_url(settings), timeout_seconds=2) as client, bar:
        task = bar.add_task("starting", total=1)
        answer: dict[str, Any] = {}
        while answer.get("status") in (None, "loading") and not ended.wait(_POLL_SECONDS):
            try:
                answer = client.readiness()
            except ClientError:
                continue
            bar.update(task, description=answer.get("stage"), completed=answer.get("progress", 1))
    if greet and answer.get("status") == "ok":
        _greet(settings, dashboard_url)


def _greet(settings: "Settings", dashboard_url: str | None) -> None:
    from memd.daemon import served_name

    url, name = _url(settings), served_name(settings)
    keyed = settings.server.keys_file is not None
    key = ' -H "Authorization: Bearer $MEMD_API_KEY"' if keyed else ""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": name, "messages": [question], "temperature": 0}
    typer.echo(
        f"\n  OpenAI API   {url}/v1\n"
        f"  Metrics      {url}/metrics\n"
        f"  Admin API    {url}/admin/v1/status\n"
        + (f"  Dashboard    {dashboard_url}\n" if dashboard_url else "")
        + f"\nTry, in another terminal:\n\n"
        f"  {_curl(url)}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(body)}'\n"
        f"\nCtrl-C stops the daemon."
    )


def _curl(url: str) -> str:
    if url.startswith("unix://"):
        return f"curl --unix-socket {url.removeprefix('unix://')} http://memd"
    return f"curl {url}"


def _is_known(settings: "Settings") -> bool:
    """Whether the address is known before the daemon listens: a service manager has its own."""
    if "LISTEN_FDS" in os.environ:
        return False
    return settings.server.host is None or settings.server.port != 0


def _url(settings: "Settings") -> str:
    host = settings.server.host
    if host is None:
        return f"unix://{Path(str(settings.server.uds)).expanduser().absolute()}"
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.server.port}"


def _version_at(url: str) -> str | None:
    """The version of the memd that answers at `url`; None when nothing does."""
    from memd.client import ClientError, Unreachable

    try:
        with connect(url, timeout_seconds=2) as client:
            return str(client.version()["version"])
    except Unreachable:
        return None
    except (ClientError, KeyError) as error:
        if isinstance(error, ClientError) and error.code == "invalid_api_key":
            return "with API keys"
        typer.echo(f"memd: something that is not memd answers at {url}", err=True)
        raise typer.Exit(ExitCode.FAILED) from None
