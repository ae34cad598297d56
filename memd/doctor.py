"""Whether this machine can run memd, and what to do where it cannot: checks that need no daemon."""

import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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


def examine_machine(settings: "Settings") -> Iterator[Check]:
    """Python, torch, GPU, memory, disk and model, under these settings."""
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
