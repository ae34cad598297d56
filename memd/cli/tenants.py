"""`memd tenants`: what each tenant has and may have."""

from typing import Annotated, Any

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
    show,
    who,
)

app = typer.Typer(
    help="See tenants, set their quotas and weights. Keys say who is which tenant.",
    no_args_is_help=True,
)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Of the tenant, as keys name it.")
]
PersistOption = Annotated[bool, typer.Option("--persist", help="Keep it over a restart.")]


@app.command("list")
def list_(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """Tenants that are set up or have been seen, with what they hold."""
    with connect(url) as client:
        answer = client.tenants()
    emit(answer, fmt, lambda: print_table(_COLUMNS, map(_row, answer["tenants"])))


@app.command("set")
def set_(
    name: NameArgument,
    reason: ReasonOption,
    quota: Annotated[
        str | None,
        typer.Option(help="Such as 20% of the pool, 2GB or none; default: as it is."),
    ] = None,
    weight: Annotated[
        float | None, typer.Option(min=0.001, max=1000, help="Default: as it is, or 1.")
    ] = None,
    persist: PersistOption = False,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Set a tenant up or change it. Above its quota its pages are the first to go when others
    need room, and its new requests wait; room that nobody needs it may use.
    """
    with connect(url) as client:
        known = client.tenants()
        rows = (row for row in known["tenants"] if row["name"] == name)
        now = next(rows, {"quota": None, "weight": 1.0})
        answer = client.set_tenant(
            name,
            reason,
            quota=now["quota"] if quota is None else None if quota == "none" else quota,
            weight=now["weight"] if weight is None else weight,
            revision=known["revision"],
            persist=persist,
            source="cli",
            who=who(),
        )
    emit(answer, fmt, lambda: print_fields(answer))


@app.command()
def unset(
    name: NameArgument,
    reason: ReasonOption,
    persist: PersistOption = False,
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Take a tenant's quota and weight away. Its keys and pages stay."""
    with connect(url) as client:
        answer = client.unset_tenant(name, reason, persist=persist, source="cli", who=who())
    text = f"{name} has no quota and the weight 1 from revision {answer['revision']} on"
    emit(answer, fmt, lambda: typer.echo(text))


_COLUMNS = (
    "tenant",
    "quota",
    "weight",
    "used",
    "pinned",
    "running",
    "waiting",
    "tokens",
    "refused",
)


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    limit = row["quota_bytes"]
    quota = "none" if row["quota"] is None else str(row["quota"])
    return (
        row["name"] or "(no key)",
        quota if limit is None or row["quota"] is None else show(limit, "quota_bytes"),
        row["weight"],
        show(row["used_bytes"], "used_bytes"),
        show(row["pinned_bytes"], "pinned_bytes"),
        show(row["running"]),
        show(row["waiting"]),
        show(row["computed_tokens"]),
        row["rejections"],
    )
