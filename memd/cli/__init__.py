"""The command `memd`."""

from typing import Annotated

import typer

from memd import __version__
from memd.cli import (
    alerts,
    analyse_heads,
    bench,
    dashboard,
    db,
    debug,
    doctor,
    eval,
    jobs,
    keys,
    models,
    plan,
    pool,
    prefixes,
    requests,
    serve,
    settings,
    status,
    support_bundle,
    talk,
    tenants,
    top,
    trace,
)
from memd.cli.common import EXIT_CODES, Commands

app = typer.Typer(
    name="memd",
    cls=Commands,
    epilog="Exit codes:\n\n" + "\n\n".join(f"{code:d}  {why}" for code, why in EXIT_CODES.items()),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memd {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version and end.",
        ),
    ] = False,
) -> None:
    """A daemon that owns a GPU's KV-cache memory, and serves LLM generation from it."""


app.command()(serve.up)
app.command()(serve.serve)
app.command()(dashboard.dashboard)
app.command()(status.status)
app.command()(top.top)
app.command()(talk.generate)
app.command()(talk.chat)
app.command()(plan.plan)
app.command("eval")(eval.evaluate)
app.command()(analyse_heads.analyse_heads)
app.command()(doctor.doctor)
app.command("support-bundle")(support_bundle.support_bundle)
app.add_typer(models.app, name="models")
app.add_typer(settings.app, name="settings")
app.add_typer(keys.app, name="keys")
app.add_typer(pool.app, name="pool")
app.add_typer(prefixes.app, name="prefixes")
app.add_typer(tenants.app, name="tenants")
app.add_typer(requests.app, name="requests")
app.add_typer(trace.app, name="trace")
app.add_typer(alerts.app, name="alerts")
app.add_typer(jobs.app, name="jobs")
app.add_typer(db.app, name="db")
app.add_typer(debug.app, name="debug")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point of the console script."""
    app()
