"""Bytes of blocks that are given back are the machine's again."""

import os
from array import array
from pathlib import Path

import torch

from memd.arena.arena import Arena
from memd.arena.cpu import CpuDriver
from memd.pool.layout import KVLayout
from memd.pool.pool import Pool
from memd.pool.watermarks import Watermarks
from memd.types import PageId, RequestId

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

    def content(page: PageId) -> torch.Tensor:
        return memory.narrow(0, layout.page_offset_bytes(page), layout.page_bytes)

    sequences = []
    for index in range(256):
        tokens = array("i", [index])
        match = pool.match(tokens, "")
        sequences.append(pool.admit(RequestId(str(index)), tokens, "", match)[0])
    before = resident_bytes()
    for index, sequence in enumerate(sequences):
        content(sequence.pages[0]).fill_(index % 251)
    full = resident_bytes()
    assert full - before > 60 * MIB
    for index, sequence in enumerate(sequences):
        if index % 4:
            pool.release(sequence, 0)
    assert pool.blocks.decommit_empty() == 0, "each block still holds a page"
    assert pool.blocks.surplus_blocks == 48
    while moves := pool.relocator.plan(20):
        for move in moves:
            content(move.target).copy_(content(move.source))
        pool.relocate(moves)
    assert pool.blocks.decommit_empty() == 48
    assert full - resident_bytes() > 44 * MIB
    for index, sequence in enumerate(sequences):
        if not index % 4:
            assert bool((content(sequence.pages[0]) == index % 251).all())
    arena.close()
