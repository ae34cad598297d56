"""What the settings' "auto" means, by kind of device. No torch: the planner uses it too."""

from typing import Literal

from memd.machine import cpu_has_bfloat16

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]

PAGE_TOKENS: dict[str, int] = {"cpu": 16, "cuda": 64}
ELEMENT_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def page_tokens_for(device: str, packed: bool) -> int:
    """Tokens of a page. Packed ones have 64 everywhere: scales are shared by 32 tokens."""
    return 64 if packed else PAGE_TOKENS[device]


def dtype_for(checkpoint: str, device: str) -> Dtype:
    """The dtype of weights and KV: the checkpoint's, where the device computes in it at speed.

    A CPU without bfloat16 instructions gets float32, several times faster there; a GPU gets
    bfloat16 for float32 checkpoints.
    """
    if device == "cpu":
        return "bfloat16" if checkpoint == "bfloat16" and cpu_has_bfloat16() else "float32"
    return "float16" if checkpoint == "float16" else "bfloat16"


def max_batch_tokens(device: str, batch_invariant: bool) -> int:
    """A batch-invariant step of a CPU has its tokens one by one: so few that it stays short."""
    if device == "cuda":
        return 8192
    return 32 if batch_invariant else 512


def host_limit_bytes(device: str) -> int:
    """For a GPU some host memory; on a CPU a host tier would only copy within the same memory."""
    return 8 * 10**9 if device == "cuda" else 0


def disk_expensive_tokens(device: str) -> int:
    """Prefixes whose computation takes longer than writing them is worth.

    On a CPU a page takes many times longer to compute than to read. A GPU computes the first
    thousand tokens about as fast as a drive delivers their pages.
    """
    return 1024 if device == "cuda" else 1


def reclaim_pages_per_step(capacity_pages: int) -> int:
    """A third of the pool in about twenty steps: quick, and spread over many steps."""
    return max(64, capacity_pages // 64)


def defrag_pages_per_step(device: str, page_bytes: int) -> int:
    """So many that a step hardly notices: some 0.1 ms of a GPU, 1 ms of a CPU core."""
    step_bytes = 128 << 20 if device == "cuda" else 2 << 20
    return min(64, max(1, step_bytes // page_bytes))


def reserve_bytes(device: str) -> int:
    """Enough for a small program to start beside memd."""
    return 512 << 20 if device == "cuda" else 256 << 20
