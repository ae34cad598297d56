"""`memd alerts`: what fires, who is told, and keeping it quiet for a while."""

from pathlib import Path
from typing import Annotated, Any

import typer

from memd.cli.alert_trials import figure, try_rule
from memd.cli.common import (
    DEFAULT_URL,
    ExitCode,
    Format,
    FormatOption,
    ReasonOption,
    UrlOption,
    connect,
    emit,
    print_table,
    when,
    who,
)
from memd.errors import MemdError
from memd.units import parse_duration

app = typer.Typer(help="See alerts, silence them, test channels.", no_args_is_help=True)
app.command("try")(try_rule)


@app.command("list")
def list_(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """Alerts that fire, are pending, or were resolved within 15 minutes."""
    with connect(url) as client:
        answer = client.alerts()
    columns = ("alert", "severity", "state", "since", "summary", "runbook")
    rows = (
        (
            row["name"],
            row["severity"],
            row["state"] + (" (silenced)" if row["silenced"] else ""),
            when(row["since"]),
            row["summary"],
            row["runbook_url"],
        )
        for row in answer["alerts"]
    )
    if answer["alerts"]:
        emit(answer, fmt, lambda: print_table(columns, rows))
    else:
        emit(answer, fmt, lambda: typer.echo(_quiet(answer["evaluated_at"])))


@app.command()
def rules(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """Every rule, and what it sees now."""
    with connect(url) as client:
        answer = client.alert_rules()
    columns = ("alert", "severity", "state", "for", "now", "limit", "runbook")
    emit(answer, fmt, lambda: print_table(columns, map(_rule_row, answer["rules"])))


@app.command()
def history(
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000)] = 50,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """What fired before, newest first."""
    with connect(url) as client:
        answer = client.incidents(limit=limit)
    columns = ("alert", "severity", "state", "fired", "resolved", "lasted", "peak", "summary")
    emit(answer, fmt, lambda: print_table(columns, map(_incident_row, answer["incidents"])))


@app.command()
def silence(
    matchers: Annotated[
        list[str],
        typer.Argument(metavar="LABEL=VALUE...", help="All must match; * and ? stand for any."),
    ],
    reason: ReasonOption,
    duration: Annotated[str, typer.Option("--for", metavar="DURATION", help="Such as 2h.")],
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Have nobody told for a while. A bare name stands for alertname=NAME."""
    try:
        seconds = parse_duration(duration)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--for") from None
    pairs = (each.partition("=") for each in matchers)
    wanted = {name if sign else "alertname": value if sign else name for name, sign, value in pairs}
    with connect(url) as client:
        answer = client.silence(wanted, seconds, reason, who())
    emit(answer, fmt, lambda: _print_silences([answer]))


@app.command()
def silences(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """The silences in force."""
    with connect(url) as client:
        answer = client.silences()
    emit(answer, fmt, lambda: _print_silences(answer["silences"]))


@app.command()
def unsilence(
    silence_id: Annotated[str, typer.Argument(metavar="ID", help="See memd alerts silences.")],
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """End a silence."""
    with connect(url) as client:
        answer = client.unsilence(silence_id)
    emit(answer, fmt, lambda: _print_silences([answer]))


@app.command()
def channels(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """Who is told, and whether it worked."""
    with connect(url) as client:
        answer = client.alert_channels()
    outcomes = ("sent", "failed", "suppressed")
    columns = ("channel", "kind", "severities", *outcomes, "last sent", "error")
    rows = (
        (
            row["name"],
            row["kind"],
            ", ".join(row["severities"]),
            *(row[outcome] for outcome in outcomes),
            when(row["last_sent_at"]) if row["last_sent_at"] is not None else "not yet",
            row["last_error"] or "",
        )
        for row in answer["channels"]
    )
    emit(answer, fmt, lambda: print_table(columns, rows))


@app.command("test")
def send_test(
    channel: Annotated[str, typer.Argument(help="As `memd alerts channels` shows it.")],
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Send a test message over a channel. Ends with 1 when it is not delivered."""
    with connect(url, timeout_seconds=120.0) as client:
        answer = client.test_channel(channel)
    text = "delivered" if answer["delivered"] else f"not delivered: {answer['error']}"
    emit(answer, fmt, lambda: typer.echo(f"{channel}: {text}"))
    if not answer["delivered"]:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def render(
    rules_file: Annotated[
        Path | None, typer.Option("--rules", help="Default: the rules of memd.")
    ] = None,
    runbooks: Annotated[
        str, typer.Option("--runbooks", help="Where runbook pages are: put before /NAME.md.")
    ] = "docs/runbooks",
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="As a PrometheusRule of its operator.")
    ] = False,
) -> None:
    """The rules for Prometheus, on stdout. Needs no daemon."""
    from memd_alerts.operator import prometheus_rule
    from memd_alerts.promql import render as rendered
    from memd_alerts.rules import RulesError

    from memd.alert_rules import read_rules

    try:
        loaded = read_rules(rules_file)
    except RulesError as error:
        raise MemdError(str(error)) from None
    text = rendered(loaded, runbooks.rstrip("/"))
    typer.echo(prometheus_rule(text) if kubernetes else text, nl=False)


def _quiet(evaluated_at: float | None) -> str:
    if evaluated_at is None:
        return "the rules have not been evaluated yet"
    return f"no alerts, as of {when(evaluated_at)}"


def _limit(rule: dict[str, Any], worst: dict[str, Any]) -> str:
    """What the value is compared with; and why the alert is quiet though it is past that."""
    value, threshold, above = worst["value"], worst["threshold"], rule["direction"] == "above"
    text = f"{rule['direction']} {figure(threshold, rule['unit'])}"
    past = threshold is not None and (value > threshold if above else value < threshold)
    return f"{text}, but another condition is not met" if past and worst["met"] is False else text


def _rule_row(rule: dict[str, Any]) -> tuple[object, ...]:
    known = [each for each in rule["values"] if each["value"] is not None]
    pick = max if rule["direction"] == "above" else min
    worst = pick(known, key=lambda each: each["value"]) if known else {}
    return (
        rule["name"],
        rule["severity"],
        "by Prometheus" if rule["evaluated_by"] == ["prometheus"] else rule["state"],
        f"{rule['for_seconds']} s",
        figure(worst.get("value"), rule["unit"]),
        _limit(rule, worst) if worst else "",
        rule["runbook_url"],
    )


def _incident_row(row: dict[str, Any]) -> tuple[object, ...]:
    lasted = row["duration_seconds"]
    return (
        row["name"],
        row["severity"],
        row["state"],
        when(row["fired_at"]),
        when(row["resolved_at"]) if row["resolved_at"] is not None else "",
        f"{lasted / 60:.1f} min" if lasted is not None else "",
        figure(row["peak"], row["unit"]),
        row["summary"],
    )


def _print_silences(silences: list[dict[str, Any]]) -> None:
    rows = (
        (
            row["id"],
            ", ".join(f"{name}={value}" for name, value in row["matchers"].items()),
            when(row["ends_at"]),
            row["covers"],
            row["author"],
            row["reason"],
        )
        for row in silences
    )
    print_table(("id", "alerts", "until", "alerts now", "author", "reason"), rows)
