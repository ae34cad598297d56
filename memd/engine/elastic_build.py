"""Puts the elastic pool together. Part of the engine's composition root."""

from collections.abc import Callable
from functools import partial

import torch

from memd.arena.arena import Arena
from memd.arena.driver import ArenaDriver
from memd.config import Settings
from memd.engine.device import free_memory_bytes, total_memory_bytes
from memd.engine.elasticity import Elasticity
from memd.engine.scheduler import Scheduler
from memd.errors import OutOfDeviceMemory
from memd.pool.elastic import Elastic
from memd.pool.layout import KVLayout
from memd.pool.limit import PoolLimit
from memd.pool.pool import Pool
from memd.pool.pressure import Pressure


def reserve_range(
    driver: ArenaDriver, layout: KVLayout, capacity_pages: int, device: torch.device
) -> tuple[Arena, int]:
    """Reserve addresses for all that the limit may ever be raised to, which cost nothing.

    Returns:
        The arena, started, and how many pages its range holds.

    Raises:
        OutOfDeviceMemory: not even `capacity_pages` can be had.
    """
    least = -(-capacity_pages // layout.pages_per_block)
    most = max(least, total_memory_bytes(device) // layout.block_bytes) if driver.elastic else least
    for num_blocks in (most, least):
        arena = Arena(driver, num_blocks, layout.block_bytes)
        try:
            arena.start()
        except OutOfDeviceMemory:
            if num_blocks == least:
                raise
        else:
            break
    return arena, num_blocks * layout.pages_per_block


def build_elasticity(
    settings: Settings,
    automatic: dict[str, int],
    pool: Pool,
    scheduler: Scheduler,
    driver: ArenaDriver,
    most_pages: int,
    base_bytes: int,
    device: torch.device,
    clock: Callable[[], float],
) -> Elasticity:
    """The elastic pool's policy and what carries it out, as the settings say.

    Args:
        automatic: What "auto" means on this device, by key.
        most_pages: Of the address range.
        base_bytes: What a limit as a share is a share of.
    """
    pressure = None
    if driver.elastic:
        pressure = Pressure(partial(free_memory_bytes, device), pool.layout.block_bytes, clock)
    elastic = Elastic(pool, PoolLimit(pool, most_pages), pressure, clock)
    defrag, memory = settings.memory.defrag, settings.memory.elastic
    elastic.idle_seconds = memory.idle
    elastic.reserve_bytes = (
        automatic["memory.elastic.reserve"] if memory.reserve == "auto" else memory.reserve
    )
    defragmenter = elastic.defragmenter
    defragmenter.every_requests = defrag.every_requests
    defragmenter.max_fragmentation = defrag.max_fragmentation
    defragmenter.pages_per_step = (
        automatic["memory.defrag.pages_per_step"]
        if defrag.pages_per_step == "auto"
        else defrag.pages_per_step
    )
    return Elasticity(pool, elastic, scheduler, base_bytes, clock)
