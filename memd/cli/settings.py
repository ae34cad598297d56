"""`memd settings`: read, preview, change and undo the settings of a running daemon."""

import getpass
import json
import math
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any

import typer

from memd.cli.common import (
    DEFAULT_URL,
    ExitCode,
    Format,
    FormatOption,
    ReasonOption,
    UrlOption,
    connect,
    emit,
    print_fields,
    print_table,
)

app = typer.Typer(help="Read, preview, change and undo settings.", no_args_is_help=True)

PairsArgument = Annotated[
    list[str], typer.Argument(metavar="KEY VALUE...", help="Keys and values, in pairs.")
]


def parse_pairs(pairs: list[str]) -> dict[str, Any]:
    """`KEY VALUE` pairs as changes. JSON scalars are what they say, anything else is text."""
    if len(pairs) % 2:
        raise typer.BadParameter(f"{pairs[-1]!r} has no value", param_hint="KEY VALUE...")
    return {key: _scalar(text) for key, text in zip(pairs[::2], pairs[1::2], strict=True)}


def _scalar(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    # JSON has no NaN and no infinity, though Python reads them; the daemon refuses them by name.
    return text if isinstance(value, float) and not math.isfinite(value) else value


@app.command()
def get(
    key: Annotated[str | None, typer.Argument(help="One key or section; default: all.")] = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """The settings in force."""
    from memd.cli.reference import written
    from memd.config import flatten

    with connect(url) as client:
        answer = client.settings()
    values = flatten(answer["settings"])
    if key is not None:
        values = {k: v for k, v in values.items() if k == key or k.startswith(key + ".")}
        if not values:
            raise typer.BadParameter(f"there is no setting {key!r}", param_hint="KEY")
    live = answer["live"]
    data = {"revision": answer["revision"], "settings": values}
    rows = ((k, written(k, v), "live" if k in live else "at start") for k, v in values.items())
    emit(data, fmt, lambda: print_table(("key", "value", "changes"), rows))


@app.command("set")
def set_(
    pairs: PairsArgument,
    reason: ReasonOption,
    revision: Annotated[
        int | None, typer.Option("--revision", help="Refuse if another has come since.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Change live settings, all or none."""
    changes = parse_pairs(pairs)
    with connect(url) as client:
        if revision is None:
            revision = client.settings()["revision"]
        answer = client.change_settings(revision, reason, changes, _who())
    emit(answer, fmt, lambda: _print_change(answer))


@app.command()
def preview(
    pairs: PairsArgument, url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE
) -> None:
    """What a change would do. Nothing is applied."""
    with connect(url) as client:
        answer = client.preview_settings(parse_pairs(pairs))
    emit(answer, fmt, lambda: _print_preview(answer))
    if not answer["valid"]:
        raise typer.Exit(ExitCode.REFUSED)


@app.command()
def undo(
    reason: ReasonOption, url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE
) -> None:
    """Take back the latest change that is not yet taken back."""
    with connect(url) as client:
        answer = client.undo_settings(reason, _who())
    emit(answer, fmt, lambda: _print_change(answer))


@app.command()
def history(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """Who changed what, when and why."""
    with connect(url) as client:
        answer = client.settings_history()
    rows = (
        (
            row["revision"],
            datetime.fromtimestamp(row["time"]).astimezone().isoformat(" ", "seconds"),
            row["who"],
            row["kind"],
            "; ".join(" ".join((k, old, "→", new)) for k, old, new in _differences(row)) or "none",
            row["reason"],
        )
        for row in answer["history"]
    )
    columns = ("revision", "time", "who", "kind", "changes", "reason")
    emit(answer, fmt, lambda: print_table(columns, rows))


@app.command()
def reference() -> None:
    """Every setting with its default, as the Markdown of docs/settings.md."""
    from memd.cli.reference import settings_page

    typer.echo(settings_page(), nl=False)


def _who() -> str | None:
    """The user, for the history; None where the system has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None


def _differences(answer: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Key, old and new value of each change, as people write them."""
    from memd.cli.reference import written

    for key, change in answer["changes"].items():
        yield key, written(key, change["old"]), written(key, change["new"])


def _print_change(answer: dict[str, Any]) -> None:
    if answer["changes"]:
        print_table(("key", "old", "new"), _differences(answer))
    else:
        typer.echo("nothing differs from what is in force")
    typer.echo(f"revision {answer['revision']}")


def _print_preview(answer: dict[str, Any]) -> None:
    if not answer["valid"]:
        print_table(("key", "problem"), answer["problems"].items())
        return
    print_table(("key", "old", "new"), _differences(answer))
    print_fields(answer["effect"] or {"effect": None})
