"""Facts about this machine, found without torch."""

import shutil
import subprocess
from pathlib import Path

_SMI = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "--id=0"]


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver is loaded or its tools are installed."""
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware."""
    try:
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)


def free_gpu_bytes() -> int:
    """Free memory of the first GPU.

    Raises:
        OSError: nvidia-smi is missing or does not tell.
    """
    try:
        answer = subprocess.run(_SMI, capture_output=True, text=True, timeout=10, check=True)
        return int(answer.stdout) << 20
    except (ValueError, subprocess.SubprocessError) as error:
        raise OSError(f"nvidia-smi does not tell what is free: {error}") from None


def free_host_bytes() -> int:
    """Memory that a new process could get: the machine's, or what a container leaves of it.

    Raises:
        OSError: the system does not tell.
    """
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    if not found:
        raise OSError("/proc/meminfo does not tell what is available")
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return found[0]
    return min(found[0], max(0, limit - used))
