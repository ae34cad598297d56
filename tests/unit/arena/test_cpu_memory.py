"""Bytes of blocks that are given back are the machine's again."""

import os
from pathlib import Path

import torch

from memd.arena.arena import Arena
from memd.arena.cpu import CpuDriver
from memd.pool.layout import KVLayout
from memd.pool.pool import Pool
from memd.pool.watermarks import Watermarks

MIB = 1 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_moving_pages_together_and_giving_blocks_back_lowers_the_resident_memory() -> None:
    layout = KVLayout(1, 1, 128, 4, 256, MIB)  # 4 pages of 256 KiB a block
    arena = Arena(CpuDriver(), 64, MIB)
    arena.start()
    memory = arena.bytes()
    pool = Pool(layout, 256, arena, Watermarks(1.0, 0.99), lambda: 0.0)
    pages = pool.blocks.take(256)
    pool.pages.open(pages, 0.0)

    def content(page: int) -> torch.Tensor:
        return memory.narrow(0, layout.page_offset_bytes(page), layout.page_bytes)  # type: ignore

    before = resident_bytes()
    for page in pages:
        content(page).fill_(page % 251)
    full = resident_bytes()
    assert full - before > 60 * MIB
    for index, page in enumerate(pages):
        if index % 4:
            pool.blocks.put(pool.pages.drop([page], 0.0))
    assert pool.blocks.decommit_empty() == 0, "each block still holds a page"
    moves = pool.blocks.surplus_blocks
    assert moves == 48
    sequence = _holding(pool, pages[::4])
    planned = pool.relocator.plan(1000)
    for move in planned:
        content(move.target).copy_(content(move.source))
    pool.relocate(planned)
    assert pool.blocks.decommit_empty() == 48
    assert full - resident_bytes() > 44 * MIB
    for page, former in zip(sequence, pages[::4], strict=True):
        assert bool((content(page) == former % 251).all())
    arena.close()


def _holding(pool: Pool, pages: list) -> list:  # type: ignore[type-arg]
    """A sequence's table that lists pages; the pool rewrites it as they move."""
    from array import array

    from memd.pool.sequence import PoolSequence
    from memd.types import RequestId

    name, table = RequestId("all"), list(pages)
    root = pool.tree.root("")
    pool.sequences[name] = PoolSequence(name, "", array("i"), table, root, 0, 0)
    return table
