"""`memd settings`: read, preview, change, confirm and undo the settings of a running daemon."""

import getpass
import json
import math
import time
from enum import StrEnum
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
    say,
)
from memd.units import parse_duration

app = typer.Typer(help="Read, preview, change and undo settings.", no_args_is_help=True)

PairsArgument = Annotated[
    list[str],
    typer.Argument(metavar="KEY VALUE...", help="Keys and values; KEY=VALUE does as well."),
]
PersistOption = Annotated[bool, typer.Option("--persist", help="Keep it over a restart.")]
RevisionOption = Annotated[
    int | None, typer.Option("--revision", help="Refuse if another has come since.")
]


class FileFormat(StrEnum):
    """Of an exported file."""

    YAML = "yaml"
    TOML = "toml"


def parse_pairs(pairs: list[str]) -> dict[str, Any]:
    """`KEY VALUE` and `KEY=VALUE` as changes. JSON scalars are what they say, others are text."""
    changes, words = {}, iter(pairs)
    for word in words:
        key, has_value, text = word.partition("=")
        if not has_value:
            try:
                text = next(words)
            except StopIteration:
                hint = "KEY VALUE..."
                raise typer.BadParameter(f"{key!r} has no value", param_hint=hint) from None
        if key in changes:
            raise typer.BadParameter(f"{key!r} is given twice", param_hint="KEY VALUE...")
        changes[key] = _scalar(text)
    return changes


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
    """The settings in force, and where each value comes from. One key: all about it."""
    from memd.cli.settings_tables import print_pending, print_setting, settings_rows
    from memd.config import flatten

    with connect(url) as client:
        answer = client.settings()
    values = flatten(answer["settings"])
    if key is not None:
        values = {k: v for k, v in values.items() if k == key or k.startswith(key + ".")}
        if not values:
            raise typer.BadParameter(f"there is no setting {key!r}", param_hint="KEY")
    sources = {name: answer["sources"][name] for name in values}
    kept = {name: answer[name] for name in ("pending", "last_reload", "file")}
    data = {"revision": answer["revision"], "settings": values, "sources": sources, **kept}
    if key in values and fmt is Format.TABLE:
        print_setting(answer, key, values[key])
    else:
        columns = ("key", "value", "source", "changes")
        emit(data, fmt, lambda: print_table(columns, settings_rows(answer, values)))
    print_pending(answer["pending"])


@app.command("set")
def set_(
    pairs: PairsArgument,
    reason: ReasonOption,
    persist: PersistOption = False,
    revert_after: Annotated[
        str | None, typer.Option(help="Take it back then (10m), unless it is confirmed.")
    ] = None,
    revision: RevisionOption = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Change live settings, all or none."""
    more: dict[str, Any] = {"persist": True} if persist else {}
    if revert_after is not None:
        more["revert_after_seconds"] = _seconds(revert_after, "--revert-after")
    _change(parse_pairs(pairs), reason, revision, url, fmt, more)


@app.command()
def reset(
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Live settings.")],
    reason: ReasonOption,
    revision: RevisionOption = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Give live values up: what file, environment and flags say is in force again."""
    _change({}, reason, revision, url, fmt, {"reset": keys})


def _change(
    changes: dict[str, Any],
    reason: str,
    revision: int | None,
    url: str,
    fmt: Format,
    more: dict[str, Any],
) -> None:
    with connect(url) as client:
        if revision is None:
            revision = client.settings()["revision"]
        answer = client.change_settings(revision, reason, changes, **more, **_author())
    _emit_change(answer, fmt)


@app.command()
def preview(
    pairs: PairsArgument, url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE
) -> None:
    """What a change would do. Nothing is applied."""
    from memd.cli.settings_tables import differences

    def show() -> None:
        if not answer["valid"]:
            print_table(("key", "problem"), answer["problems"].items())
            return
        print_table(("key", "old", "new"), differences(answer))
        print_fields(answer["effect"] or {"effect": None})

    with connect(url) as client:
        answer = client.preview_settings(parse_pairs(pairs))
    emit(answer, fmt, show)
    if not answer["valid"]:
        raise typer.Exit(ExitCode.REFUSED)


@app.command()
def confirm(
    revision: Annotated[
        int | None, typer.Argument(help="Default: the one that waits to be confirmed.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Let a change stay that would revert by itself."""
    with connect(url) as client:
        if revision is None:
            pending = client.settings()["pending"]
            if pending is None:
                say("memd: no change waits to be confirmed")
                raise typer.Exit(ExitCode.REFUSED)
            revision = pending["revision"]
        answer = client.confirm_settings(revision, **_author())
    emit(answer, fmt, lambda: typer.echo(f"revision {revision} stays"))


@app.command()
def undo(
    reason: ReasonOption,
    revision: Annotated[
        int | None, typer.Option("--revision", help="Which; default: the latest in effect.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Take back a change; taking back an undo puts its change in force again."""
    chosen = {} if revision is None else {"revision": revision}
    with connect(url) as client:
        answer = client.undo_settings(reason, **chosen, **_author())
    _emit_change(answer, fmt)


@app.command()
def reload(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """Have the daemon read file and environment again: live settings change, all or none."""
    from memd.cli.settings_tables import reload_rows

    with connect(url) as client:
        answer = client.reload_settings(**_author())
    rows = list(reload_rows(answer["results"]))

    def show() -> None:
        if rows:
            print_table(("key", "result", "in force", "sources say"), rows)
        else:
            typer.echo("nothing differs from what is in force")
        typer.echo(f"revision {answer['revision']}")

    emit(answer, fmt, show)


@app.command()
def diff(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """Where what is in force differs from file, environment and flags, and after a restart."""
    from memd.cli.settings_tables import diff_rows

    with connect(url) as client:
        answer = client.settings_diff()
    columns = ("key", "in force", "sources say", "source", "after a restart")

    def show() -> None:
        if answer["differences"]:
            print_table(columns, diff_rows(answer["differences"]))
        else:
            typer.echo("nothing differs from what is in force")

    emit(answer, fmt, show)


@app.command()
def export(
    fmt: Annotated[FileFormat, typer.Option("--format", help="Of the file.")] = FileFormat.YAML,
    everything: Annotated[bool, typer.Option("--all", help="Also what is as by default.")] = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """The settings in force as a settings file."""
    with connect(url) as client:
        typer.echo(client.export_settings(fmt.value, everything)["text"], nl=False)


@app.command()
def history(
    key: Annotated[str | None, typer.Option(help="Only changes of this key or section.")] = None,
    who: Annotated[str | None, typer.Option(help="Only changes by them.")] = None,
    source: Annotated[
        str | None, typer.Option(help="cli, api, dashboard, file or schedule.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Only as old as this: 2h, 7d.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most rows.")] = 100,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Who changed what, when and why; and how it was in the five minutes before and after."""
    from memd.cli.settings_tables import history_table

    filters: dict[str, Any] = {"key": key, "who": who, "source": source, "limit": limit}
    if since is not None:
        filters["since"] = max(0.0, time.time() - _seconds(since, "--since"))
    filters["measured"] = "true"
    with connect(url) as client:
        answer = client.settings_history(**filters)
    emit(answer, fmt, lambda: print_table(*history_table(answer["history"])))


@app.command()
def reference() -> None:
    """Every setting with its default, as the Markdown of docs/settings.md."""
    from memd.cli.reference import settings_page

    typer.echo(settings_page(), nl=False)


def _author() -> dict[str, str]:
    """The user, for the history; left out where the system has no name for it."""
    try:
        return {"source": "cli", "who": getpass.getuser()}
    except (KeyError, OSError):
        return {"source": "cli"}


def _seconds(text: str, option: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _emit_change(answer: dict[str, Any], fmt: Format) -> None:
    from memd.cli.settings_tables import differences, print_pending

    def show() -> None:
        if answer["changes"]:
            print_table(("key", "old", "new"), differences(answer))
        else:
            typer.echo("nothing differs from what is in force")
        typer.echo(f"revision {answer['revision']}")

    emit(answer, fmt, show)
    print_pending(answer.get("pending"))
