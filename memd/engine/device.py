"""Facts about the device the engine runs on, and the choices that follow from them."""

import logging
import os
from pathlib import Path

import torch
from memd_kernels import copy_host_pages, launch

from memd.arena.cpu import CpuDriver
from memd.arena.cuda import CudaDriver, supports_virtual_memory
from memd.arena.driver import ArenaDriver
from memd.arena.single import SingleAllocationDriver
from memd.automatic import dtype_for
from memd.config import Settings, cache_dir
from memd.engine.messages import GpuFacts
from memd.errors import SettingsError
from memd.machine import free_host_bytes
from memd.models.config import ModelConfig
from memd.tiers.copier import Copier
from memd.tiers.cuda import CudaHostCopier
from memd.tiers.host import HostCopier
from memd.units import format_size

logger = logging.getLogger(__name__)

FP8_CAPABILITY = (8, 9)  # of a GPU that converts fp8 numbers
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(settings: Settings) -> torch.device:
    """The device asked for, or CUDA where there is one.

    Raises:
        SettingsError: a CUDA device is asked for that is not there.
    """
    wanted = settings.engine.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cpu":
        return device
    device, count = torch.device("cuda", device.index or 0), torch.cuda.device_count()
    if device.index >= count:
        raise SettingsError({"engine.device": f"{wanted!r} asked for, {count} CUDA devices found"})
    torch.cuda.set_device(device)  # launches and pinned memory go to the current device
    return device


def choose_dtype(settings: Settings, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of weights and KV: as set, or what suits the device."""
    name = settings.model.dtype
    return _DTYPES[dtype_for(model.dtype, device.type) if name == "auto" else name]


def choose_driver(device: torch.device) -> ArenaDriver:
    """Where the arena's memory comes from; on a CUDA device without virtual memory it stays."""
    if device.type == "cpu":
        return CpuDriver()
    return CudaDriver(device) if supports_virtual_memory(device) else SingleAllocationDriver(device)


def choose_copier(device: torch.device) -> Copier:
    """Who copies pages between the device and the host."""
    if device.type == "cpu":
        return HostCopier()
    return CudaHostCopier(copy_host_pages)


def load_launch_table(device: torch.device) -> None:
    """Take launch parameters that were measured on this machine, if there are any."""
    if device.type == "cpu":
        return
    path = launch_table_path(device)
    try:
        launch.load_user_table(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        logger.warning("launch table %s is not used: %s", path, error)


def launch_table_path(device: torch.device) -> Path:
    """Where `python -m memd_kernels.tune --output` puts what memd looks for."""
    name = torch.cuda.get_device_name(device).replace(" ", "-").lower()
    return cache_dir() / "launch_tables" / f"{name}.json"


def launch_table(device: torch.device) -> str | None:
    """Where launch parameters come from: "user", "shipped" or "default"; None on a CPU."""
    return None if device.type == "cpu" else launch.source(launch.capability(device))


def free_memory_bytes(device: torch.device) -> int:
    """Memory a new allocation could get now."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def total_memory_bytes(device: torch.device) -> int:
    """All memory of a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def shortage(device: torch.device, needed_bytes: int, free_bytes: int) -> str:
    """That a model does not fit, in words: what it needs, what there was, what to change."""
    needed, free, total = map(format_size, (needed_bytes, free_bytes, total_memory_bytes(device)))
    return (
        f"the model does not fit: its files have {needed}, {device} had {free} free of {total}; "
        "end what holds the rest, or set model.path to a smaller model or engine.device to "
        "another device"
    )


def gpu_facts(
    device: torch.device, weights_bytes: int, graphs_bytes: int, pool_in_allocator: bool
) -> GpuFacts | None:
    """What the operator is told of the engine's GPU; None on a CPU."""
    if device.type == "cpu":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return GpuFacts(uuid, weights_bytes, graphs_bytes, pool_in_allocator)


def allocator_bytes(device: torch.device) -> int | None:
    """Memory that torch's allocator has taken from a GPU; None on a CPU."""
    return None if device.type == "cpu" else torch.cuda.memory_reserved(device)


def use_threads(settings: Settings, device: torch.device) -> None:
    """On a CPU, compute with as many threads as set, or one for each core this process may use."""
    if device.type == "cpu":
        threads = settings.engine.threads
        torch.set_num_threads(len(os.sched_getaffinity(0)) if threads == "auto" else threads)


def fp8_missing(device: torch.device) -> str | None:
    """Why a device cannot read `fp8` pages; None: it can, a CPU in plain torch."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_capability(device)
    if found >= FP8_CAPABILITY:
        return None
    least = ".".join(map(str, FP8_CAPABILITY))
    return f"fp8 needs compute capability {least}, {device} has {found[0]}.{found[1]}"
