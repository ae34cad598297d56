"""`memd keys`: the API keys in the file of `server.keys_file`."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memd.cli.common import Format, FormatOption, emit, print_table, say

if TYPE_CHECKING:
    from memd.keys import ApiKey, KeysFile

app = typer.Typer(
    help="Add, list and revoke API keys. A running daemon follows at once.", no_args_is_help=True
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Of the key.")]
FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        dir_okay=False,
        envvar="MEMD_SERVER_KEYS_FILE",
        help="Keys file; default: keys.jsonl in the state directory.",
    ),
]


@app.command()
def add(
    name: NameArgument,
    scopes: Annotated[
        str,
        typer.Option(
            "--scopes",
            help="What it opens, by commas: inference, metrics, admin:read, admin:write.",
        ),
    ] = "inference",
    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant", help="Keys of one tenant share cache and fair share; default: NAME."
        ),
    ] = None,
    priority: Annotated[
        str | None,
        typer.Option("--priority", metavar="MIN:MAX", help="That requests may ask for."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="DURATION", help="From now, such as 30d.")
    ] = None,
    file: FileOption = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Make a key and print it, once: the file holds only its hash."""
    from memd.keys import make_key

    keys = _keys(file)
    wanted = [scope.strip() for scope in scopes.split(",")]
    text, key = make_key(name, wanted, tenant or name, _range(priority), _seconds(expires))
    keys.add(key)
    emit({**_shown(key), "key": text}, fmt, lambda: typer.echo(text))
    say(f"It is not shown again. A daemon uses it with --set server.keys_file={keys.path}")


@app.command("list")
def list_command(file: FileOption = None, fmt: FormatOption = Format.TABLE) -> None:
    """The keys, without what would let anybody in."""
    shown = [_shown(key) for key in _keys(file).read()]
    columns = ("name", "scopes", "tenant", "priority", "created", "expires", "state")
    emit({"keys": shown}, fmt, lambda: print_table(columns, map(_row, shown)))


@app.command()
def revoke(name: NameArgument, file: FileOption = None, fmt: FormatOption = Format.TABLE) -> None:
    """Remove a key. It opens nothing from the next request on."""
    keys = _keys(file)
    keys.revoke(name)
    emit({"revoked": name}, fmt, lambda: None)
    say(f"{name} is removed from {keys.path}")


def _keys(file: Path | None) -> "KeysFile":
    from memd.config import state_dir
    from memd.config_sources import load
    from memd.keys import KeysFile

    return KeysFile((file or state_dir(load()) / "keys.jsonl").expanduser())


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    lowest, colon, highest = text.partition(":")
    try:
        return int(lowest), int(highest if colon else lowest)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not MIN:MAX, such as 0:10", param_hint="--priority"
        ) from None


def _seconds(text: str | None) -> float | None:
    from memd.units import parse_duration

    if text is None:
        return None
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--expires") from None


def _shown(key: "ApiKey") -> dict[str, Any]:
    return {
        "name": key.name,
        "scopes": list(key.scopes),
        "tenant": key.tenant,
        "priority": list(key.priority) if key.priority else None,
        "created": _date(key.created),
        "expires": None if key.expires is None else _date(key.expires),
        "state": "expired" if key.expired(time.time()) else "valid",
    }


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _row(key: dict[str, Any]) -> list[str]:
    priority = key["priority"]
    return [
        key["name"],
        ", ".join(key["scopes"]),
        key["tenant"],
        "any" if priority is None else f"{priority[0]}:{priority[1]}",
        key["created"],
        key["expires"] or "never",
        key["state"],
    ]
