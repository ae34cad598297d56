"""`memd support-bundle`: what helps others to understand a daemon, as one file."""

from pathlib import Path
from typing import Annotated

import typer

from memd.cli.common import DEFAULT_URL, Format, FormatOption, UrlOption, connect, emit, say
from memd.errors import MemdError
from memd.units import format_size


def support_bundle(
    file: Annotated[Path, typer.Argument(help="Where to write it, a .tar.gz; - for stdout.")],
    url: UrlOption = DEFAULT_URL,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Write an archive for a bug report: states, settings, metrics, log; no prompts, no secrets."""
    with connect(url, timeout_seconds=60.0) as client:
        data = client.support_bundle()
    if str(file) == "-":
        typer.get_binary_stream("stdout").write(data)
        return
    try:
        # Readable by its owner only: what is in it is for those it is sent to.
        file.touch(mode=0o600)
        file.write_bytes(data)
    except OSError as error:
        raise MemdError(f"{file} cannot be written: {error.strerror}") from None
    answer = {"file": str(file), "size_bytes": len(data)}
    emit(answer, fmt, lambda: typer.echo(f"{file}: {format_size(len(data))}"))
    say("Look into it before you send it: names of models, tenants and folders are in it.")
