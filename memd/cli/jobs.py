"""`memd jobs`: what the daemon does every so often."""

from typing import Annotated, Any

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
    print_table,
    when,
)

app = typer.Typer(help="See the daemon's jobs, and run one now.", no_args_is_help=True)


@app.command("list")
def list_(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """The jobs, their latest run and the next one."""
    with connect(url) as client:
        answer = client.jobs()
    columns = ("job", "every", "last run", "outcome", "took", "next run", *_RUNS, "error")
    emit(answer, fmt, lambda: print_table(columns, (_row(job) for job in answer["jobs"])))


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="As `memd jobs list` shows it.")],
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Run a job now, and wait for it. Ends with 1 when it fails."""
    with connect(url, timeout_seconds=1800.0) as client:
        answer = client.run_job(name)
    emit(answer, fmt, lambda: print_fields(answer))
    if answer["last_outcome"] == "error":
        raise typer.Exit(ExitCode.FAILED)


_RUNS = ("ok", "error", "missed", "skipped")


def _row(job: dict[str, Any]) -> tuple[object, ...]:
    took = job["last_duration_seconds"]
    return (
        job["name"],
        f"{job['every_seconds']:g} s",
        when(job["last_run_at"]) if job["last_run_at"] is not None else "not yet",
        job["last_outcome"] or "",
        f"{took:.3f} s" if took is not None else "",
        "running" if job["running"] else when(job["next_run_at"]),
        *(job["runs"][outcome] for outcome in _RUNS),
        job["last_error"] or "",
    )
