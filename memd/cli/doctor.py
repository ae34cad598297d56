"""`memd doctor`: whether this machine can run memd, and what to do where it cannot."""

import socket
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from memd.cli.common import (
    DEFAULT_URL,
    ExitCode,
    Format,
    FormatOption,
    UrlOption,
    connect,
    emit,
    print_table,
)
from memd.doctor import Check, examine_machine

if TYPE_CHECKING:
    from memd.config import Settings


def doctor(url: UrlOption = DEFAULT_URL, fmt: FormatOption = Format.TABLE) -> None:
    """Check Python, torch, GPU, memory, disk, port, model and daemon."""
    from memd.config_sources import load

    checks = list(examine(load(), url))
    rows = ((check.result, check.name, check.finding, check.advice) for check in checks)
    emit(
        [asdict(check) for check in checks],
        fmt,
        lambda: print_table(("", "what", "finding", "what to do"), rows),
    )
    if any(check.result == "fail" for check in checks):
        raise typer.Exit(ExitCode.FAILED)


def examine(settings: "Settings", url: str) -> Iterator[Check]:
    """All checks, under the settings that a daemon started from here would have."""
    yield from examine_machine(settings)
    if settings.server.host is not None:
        yield _port(settings.server.host, settings.server.port)
    yield _daemon(url)


def _port(host: str, port: int) -> Check:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = "fine if that is memd, else set server.port"
            return Check("port", "warn", f"{host}:{port}: {error.strerror}", advice)
    return Check("port", "ok", f"{host}:{port} is free")


def _daemon(url: str) -> Check:
    from memd.client import ClientError, Unreachable

    try:
        with connect(url, timeout_seconds=2) as client:
            state = client.status()["state"]
    except Unreachable:
        return Check("daemon", "warn", f"none answers at {url}", "memd up")
    except ClientError as error:
        if error.status in (401, 403):
            return Check("daemon", "warn", str(error), "set MEMD_API_KEY to a key with admin:read")
        return Check("daemon", "fail", str(error), "look at what listens there, or give --url")
    return Check("daemon", "ok" if state == "ready" else "warn", f"{state} at {url}")
