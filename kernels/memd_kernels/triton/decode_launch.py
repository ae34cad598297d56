"""How the kernel of `decode_attention` is launched, beyond what the launch tables say."""

from memd_kernels.launch import LaunchConfig

MOST_PARTS = 16  # of a row that are put together in one stage
LEAST_REGISTERS = 168  # of a thread where pages may be packed: 12 warps run at once
MOST_REGISTERS = 255
ALL_REGISTERS = 65536  # of a multiprocessor
OVERLAPPED = "overlapped"  # variant of a launch: begins while the kernel before it ends
ALONE_BYTES = 112 << 10  # of shared memory with the query: no second program fits beside
MOST_ROOM = 46 << 10  # of shared memory that a kernel may declare
COMBINED_ELEMENTS = 2048  # of parts that a warp reads at once, at most: a third of its registers


def combined_step(elements: int, num_warps: int, mixed: bool) -> int:
    """How many parts of so many elements are read at once, a power of two."""
    most = MOST_PARTS
    if mixed:  # kernels for packed pages have registers for fewer
        most //= 4
    return min(max(COMBINED_ELEMENTS * num_warps // elements, 1), most)


def mixed_registers(config: LaunchConfig) -> int:
    """At most, of a thread where pages may be packed: all programs of a launch are to run at once,
    unless that leaves too few."""
    threads = 32 * config.num_warps * max(config.splits, 1)
    each = ALL_REGISTERS // threads // 8 * 8  # registers are given out in eights
    return max(LEAST_REGISTERS, min(each, MOST_REGISTERS))


def launch_room(config: LaunchConfig, tile_bytes: int) -> int | None:
    """Shared memory to take besides, so that one program alone fits on a multiprocessor; None: more
    than may be taken, or the tiles are too large to have been tried.

    Those of an overlapped launch come up one by one, and would gather where there is room.
    """
    room = ALONE_BYTES - (config.num_stages - 1) * tile_bytes
    return room if config.splits == 1 and 0 <= room <= MOST_ROOM else None
