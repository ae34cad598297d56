"""`memd models`: what can be served from this machine."""

from pathlib import Path
from typing import Annotated

import typer

from memd.cli.common import (
    Format,
    FormatOption,
    byte_progress,
    emit,
    print_fields,
    print_table,
)
from memd.units import format_size

app = typer.Typer(help="Fetch, list and inspect models.", no_args_is_help=True)


def fetch_model(name: str) -> Path:
    """Fetch a demo model into the cache, with progress on stderr; at once when it is there."""
    from memd.config import cache_dir
    from memd.models.hub import fetch

    with byte_progress(f"fetching {name}") as progress:
        return fetch(name, cache_dir(), progress)


@app.command("fetch")
def fetch_command(
    name: Annotated[str, typer.Argument(help="Demo name, such as smollm2-135m.")],
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Fetch a demo model into the cache."""
    path = fetch_model(name)
    emit({"name": name, "path": str(path)}, fmt, lambda: typer.echo(str(path)))


@app.command("list")
def list_command(fmt: FormatOption = Format.TABLE) -> None:
    """The demo models, and the models in the caches."""
    from memd.config import cache_dir
    from memd.models.catalog import list_models

    models = list_models(cache_dir())
    data = [
        {
            "name": model.name,
            "source": model.source,
            "size_bytes": model.size_bytes,
            "path": str(model.path) if model.path else None,
        }
        for model in models
    ]
    rows = (
        (model.name, model.source, format_size(model.size_bytes), model.path or "not fetched")
        for model in models
    )
    emit(data, fmt, lambda: print_table(("name", "source", "size", "path"), rows))


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="Directory, GGUF file, hub name or demo name.")],
    fmt: FormatOption = Format.TABLE,
) -> None:
    """What a model's files say, without loading it."""
    from memd.models.catalog import describe
    from memd.models.hub import resolve

    facts = describe(resolve(model))
    emit(facts, fmt, lambda: print_fields(facts))
