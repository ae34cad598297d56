"""Whose a GPU's memory is. A pure function of what NVML and the engine say."""

from dataclasses import dataclass

from memd.engine.messages import GpuFacts


@dataclass(frozen=True)
class BoardMemory:
    """What NVML says of a board, bytes.

    Args:
        total: Of the board.
        used: By processes, and by the driver where it does not tell `reserved` apart.
        free: To be had.
        reserved: By driver and firmware; None: this driver does not tell.
    """

    total: int
    used: int
    free: int
    reserved: int | None


@dataclass(frozen=True)
class MemoryByOwner:
    """Parts of a board's memory; they sum to its total.

    Args:
        bytes_of: By owner, as `memd.observe.catalog.gpu.OWNERS` names them.
        estimated: What is not the daemon's may be its own: NVML does not tell its process's use.
    """

    bytes_of: dict[str, int]
    estimated: bool


def memory_by_owner(
    board: BoardMemory,
    pool_bytes: int,
    facts: GpuFacts,
    allocator_bytes: int | None,
    process_bytes: int | None,
) -> MemoryByOwner:
    """Attribute what is used.

    The daemon's own use is what its allocators say. What NVML lists for the engine's process adds
    the driver's context to it, but only if it can be true: in a container a process may not be
    listed, be listed under a number that means another one there, or without its use.

    Args:
        board: As read just now.
        pool_bytes: That the pool has taken.
        facts: Of the engine.
        allocator_bytes: That torch's allocator has taken; None: not known yet.
        process_bytes: That NVML lists for the engine's process; None: it does not.
    """
    fixed_bytes = facts.weights_bytes + facts.graphs_bytes
    in_allocator = fixed_bytes + (pool_bytes if facts.pool_in_allocator else 0)
    rest = max(0, (allocator_bytes or 0) - in_allocator)
    known_bytes = pool_bytes + fixed_bytes + rest
    listed = process_bytes is not None and known_bytes <= process_bytes <= board.used
    if listed and process_bytes is not None:
        rest += process_bytes - known_bytes
    bytes_of: dict[str, int] = {}
    left = board.used  # read at another moment than the daemon's own: no part may exceed it
    for owner, wanted in (
        ("pool", pool_bytes),
        ("weights", facts.weights_bytes),
        ("graphs", facts.graphs_bytes),
        ("other_self", rest),
    ):
        bytes_of[owner] = min(wanted, left)
        left -= bytes_of[owner]
    bytes_of["other_processes"] = left
    if board.reserved is not None:
        bytes_of["reserved"] = board.reserved
    bytes_of["free"] = board.free
    return MemoryByOwner(bytes_of, estimated=not listed)
