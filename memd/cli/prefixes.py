"""`memd prefixes`: what is cached, what a prompt would find, and pins."""

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from memd.cli.common import (
    DEFAULT_URL,
    Format,
    FormatOption,
    ReasonOption,
    UrlOption,
    connect,
    emit,
    print_fields,
    print_table,
    when,
    who,
)
from memd.types import PrefixOrder
from memd.units import format_size, parse_duration

app = typer.Typer(
    help="See cached prefixes, explain a prompt, pin and unpin.", no_args_is_help=True
)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="As `memd prefixes list` shows it.")]
_SORTS = ", ".join(get_args(PrefixOrder))
_REASONS = {
    "complete": "all of it is there; the last token is always computed",
    "awaited": "another request is computing it now",
    "evicted": "it was there, and was evicted",
    "isolated": "another tenant or salt has it, and caches are kept apart",
    "differs": "what is cached goes on with other tokens there",
    "unseen": "nothing is cached beyond there",
}


@app.command("list")
def list_(
    sort: Annotated[str, typer.Option(help=f"By: {_SORTS}.")] = "tokens",
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    pinned: Annotated[
        bool | None,
        typer.Option("--pinned/--not-pinned", help="Only those with a pin, or without."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most rows.")] = 30,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """The cached prefixes, each a stretch of pages between two branchings. No text is shown."""
    filters = {"sort": sort, "tenant": tenant, "pinned": None if pinned is None else str(pinned)}
    given = {name: value for name, value in filters.items() if value is not None}
    with connect(url) as client:
        answer = client.prefixes(limit=limit, **given)
    emit(answer, fmt, lambda: print_table(_COLUMNS, map(_row, answer["prefixes"])))


@app.command()
def explain(
    prompt: Annotated[str | None, typer.Argument(help="Text; or give --file or --request.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", exists=True, dir_okay=False, help="With the text.")
    ] = None,
    request: Annotated[str | None, typer.Option("--request", help="Id of an open request.")] = None,
    tenant: Annotated[str, typer.Option(help="Whose cache is looked into.")] = "",
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """What a prompt would find in the cache now, and what stops the rest. Nothing is kept."""
    if [prompt, file, request].count(None) != 2:
        raise typer.BadParameter("give one of PROMPT, --file and --request")
    text = file.read_text(encoding="utf-8") if file is not None else prompt
    with connect(url) as client:
        if request is not None:
            answer = client.explain_prefix(request_id=request)
        else:
            answer = client.explain_prefix(text, tenant=tenant)
    emit(answer, fmt, lambda: _print_explanation(answer))


@app.command()
def pin(
    prefix_id: IdArgument,
    reason: ReasonOption,
    ttl: Annotated[
        str | None, typer.Option("--ttl", metavar="DURATION", help="Such as 2h; default: for good.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Keep a prefix, from its first token on, from eviction. Pins share memory.pin_limit."""
    with connect(url) as client:
        answer = client.pin(prefix_id, _seconds(ttl), reason, who=who())
    emit(answer, fmt, lambda: print_fields(_dated(answer)))


@app.command()
def unpin(
    prefix_id: IdArgument,
    reason: ReasonOption,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """End the pins of a prefix."""
    with connect(url) as client:
        answer = client.unpin(prefix_id, reason, who=who())
    emit(answer, fmt, lambda: print_fields(answer))


@app.command()
def evict(
    prefix_id: IdArgument,
    reason: ReasonOption,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Forget a prefix and what follows it, except what is held or pinned."""
    with connect(url) as client:
        answer = client.evict_prefix(prefix_id, reason, who=who())
    emit(answer, fmt, lambda: print_fields(answer))


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--ttl") from None


_COLUMNS = (
    "id",
    "tenant",
    "from",
    "tokens",
    "size",
    "on host",
    "holders",
    "hits",
    "hits/h",
    "last hit",
    "pinned until",
)


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["id"],
        row["tenant"],
        row["start_token"],
        row["tokens"],
        format_size(row["bytes"]),
        row["host_pages"],
        row["holders"],
        row["hits"],
        row["hits_per_hour"],
        "never" if row["last_hit_at"] is None else when(row["last_hit_at"]),
        _until(row["pinned_until"]) if row["pinned"] else "",
    )


def _until(seconds: float | None) -> str:
    return "for good" if seconds is None else when(seconds)


def _dated(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "pinned_until": _until(answer["pinned_until"])}


def _print_explanation(answer: dict[str, Any]) -> None:
    hits = answer["hit_tokens"]
    evicted = answer["evicted_age_seconds"]
    nearest = answer["nearest"]
    reason = _REASONS[answer["reason"]]
    print_fields(
        {
            "prompt_tokens": answer["prompt_tokens"],
            "found": (
                f"{hits['device']} tokens on the device, {hits['host']} on the host, "
                f"{hits['disk']} on disk"
            ),
            "to compute": f"{answer['computed_tokens']} tokens",
            "ends at token": answer["first_missing_token"],
            "because": reason if evicted is None else f"{reason}, {evicted:.0f} s ago",
            "nearest prefix": (
                "none" if nearest is None else f"{nearest['id']}, {nearest['tokens']} tokens"
            ),
        }
    )
