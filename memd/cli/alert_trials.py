"""`memd alerts try`: how often a rule would have fired with another limit."""

import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from memd.cli.common import (
    DEFAULT_URL,
    Format,
    FormatOption,
    UrlOption,
    connect,
    emit,
    print_table,
    when,
)
from memd.units import parse_duration, parse_share, parse_size

_DAY_SECONDS = 86_400.0


def try_rule(
    rule: Annotated[str, typer.Argument(help="As `memd alerts rules` shows it.")],
    threshold: Annotated[
        str | None,
        typer.Option("--threshold", help="A number, or with a unit: 5%, 250ms, 1GiB."),
    ] = None,
    hold: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="How long it must hold.")
    ] = None,
    since: Annotated[str, typer.Option("--since", metavar="DURATION", help="How far back.")] = "7d",
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """How often a rule would have fired with another limit or hold time. Changes nothing."""
    limit = None if threshold is None else _number(threshold)
    seconds = None if hold is None else int(_duration(hold, "--for"))
    start = max(0.0, time.time() - _duration(since, "--since"))
    with connect(url, timeout_seconds=120.0) as client:
        answer = client.try_rule(rule, limit, seconds, start)
    emit(answer, fmt, lambda: _print(answer))


def _number(text: str) -> float:
    for parse in (float, parse_share, parse_duration, parse_size):
        try:
            return float(parse(text))
        except ValueError:
            continue
    raise typer.BadParameter(
        f"{text!r} is not a number, such as 0.2, 5%, 250ms or 1GiB", param_hint="--threshold"
    )


def _duration(text: str, option: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _print(answer: Mapping[str, Any]) -> None:
    covered = answer["covered_seconds"] / _DAY_SECONDS
    whole = (answer["until"] - answer["since"]) / _DAY_SECONDS
    typer.echo(f"{answer['rule']}: samples of {covered:.2f} of {whole:.2f} days")
    columns = ("", "limit", "ends at", "for", "fired", "firing for", "did not last")
    print_table(columns, _forms(answer))
    firings = [
        (
            name,
            when(each["fired_at"]),
            when(each["resolved_at"]) if each["resolved_at"] is not None else "",
            figure(each["peak"], answer["unit"]),
            ", ".join(f"{key}={value}" for key, value in sorted(each["labels"].items())),
        )
        for name, key in (("as it is", "as_it_is"), ("tried", "tried"))
        for each in answer[key]["firings"]
    ]
    if firings:
        print_table(("", "fired", "resolved", "peak", "labels"), firings)


def _forms(answer: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for name, key in (("as it is", "as_it_is"), ("tried", "tried")):
        form = answer[key]
        limit = (
            "measured" if form["threshold"] is None else figure(form["threshold"], answer["unit"])
        )
        yield (
            name,
            f"{answer['direction']} {limit}",
            "" if form["clear"] is None else figure(form["clear"], answer["unit"]),
            f"{form['for_seconds']} s",
            form["fired"],
            f"{form['firing_seconds'] / 60:.1f} min",
            form["pending_only"],
        )


def figure(value: float | None, unit: Any) -> str:
    """What a rule looks at, with the unit that the daemon tells of it."""
    from memd_alerts.evaluate import format_value

    return format_value(value, unit or "number")
