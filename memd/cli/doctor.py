"""`memd doctor`: whether this machine can run memd, and what to do where it cannot."""

import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
from memd.machine import free_gpu_bytes, free_host_bytes, has_nvidia_driver
from memd.units import format_size

if TYPE_CHECKING:
    from memd.config import Settings

_LEAST_MEMORY_BYTES = 2 << 30
_LEAST_DISK_BYTES = 1 << 30


@dataclass(frozen=True)
class Check:
    """One finding; `advice` says what to do unless it is ok."""

    name: str
    result: Literal["ok", "warn", "fail"]
    finding: str
    advice: str = ""


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
    has_driver = has_nvidia_driver()
    yield _python()
    yield _torch(has_driver)
    yield _triton(has_driver)
    yield _driver(has_driver)
    if has_driver:
        yield _memory("gpu memory", free_gpu_bytes)
    yield _memory("memory", free_host_bytes)
    yield _disk()
    yield _model(settings.model.path)
    if settings.server.host is not None:
        yield _port(settings.server.host, settings.server.port)
    yield _daemon(url)


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} in {sys.prefix}")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch(has_driver: bool) -> Check:
    found = _installed("torch")
    if found is None:
        return Check("torch", "fail", "not installed", "pip install torch")
    if has_driver and found.endswith("+cpu"):
        return Check("torch", "warn", f"{found} cannot use the GPU", "install the CUDA build")
    return Check("torch", "ok", found)


def _triton(has_driver: bool) -> Check:
    found = _installed("triton")
    if found is None:
        return Check(
            "triton",
            "warn" if has_driver else "ok",
            "not installed",
            "pip install triton" if has_driver else "",
        )
    return Check("triton", "ok", found)


def _driver(has_driver: bool) -> Check:
    if not has_driver:
        return Check("gpu", "warn", "no NVIDIA driver", "memd runs on the CPU, for small models")
    path = Path("/proc/driver/nvidia/version")
    text = path.read_text(encoding="utf-8").splitlines()[0] if path.exists() else "driver present"
    return Check("gpu", "ok", text.removeprefix("NVRM version: ").strip())


def _memory(name: str, free: Callable[[], int]) -> Check:
    try:
        free_bytes = free()
    except OSError as error:
        return Check(name, "warn", str(error), "give memory.limit in bytes")
    finding = f"{format_size(free_bytes)} free"
    if free_bytes < _LEAST_MEMORY_BYTES:
        return Check(name, "warn", finding, "`memd plan MODEL` tells what is needed")
    return Check(name, "ok", finding)


def _disk() -> Check:
    from memd.config import cache_dir

    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    finding = f"{format_size(free_bytes)} free for {folder}"
    if free_bytes < _LEAST_DISK_BYTES:
        return Check("disk", "warn", finding, "make room, or point XDG_CACHE_HOME elsewhere")
    return Check("disk", "ok", finding)


def _model(path: str) -> Check:
    from memd.errors import ModelError
    from memd.models.hub import DEMO_MODELS, resolve

    if path not in DEMO_MODELS and not Path(path).expanduser().exists():
        return Check("model", "warn", f"{path} is not on this machine", "looked up at the start")
    try:
        files = resolve(path)
    except ModelError as error:
        return Check("model", "warn", str(error))
    return Check("model", "ok", str(files.gguf or files.directory))


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
