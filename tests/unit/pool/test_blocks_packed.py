"""Blocks of two formats, and where their pages lie."""

import hypothesis.strategies as st
import memd_kernels.formats
import pytest
from hypothesis import given
from pool_model import FakeBacking

from memd.errors import OutOfDeviceMemory, PoolExhausted
from memd.pool.blocks import Blocks
from memd.pool.defrag import plan_emptying, plan_moves
from memd.pool.layout import KVLayout
from memd.types import PACKED_PAGE, BlockId, PageId

FULL, PACKED = 4, 7


def make_blocks(limit_pages: int, backing: FakeBacking | None = None) -> Blocks:
    return Blocks(limit_pages, FULL, backing or FakeBacking(), lambda: 0.0, PACKED)


def test_a_packed_block_takes_the_room_of_its_full_pages() -> None:
    blocks = make_blocks(4 * FULL)
    packed = blocks.take_packed(PACKED + 1)
    assert blocks.packed_blocks == 2
    assert blocks.free_full_pages == 2 * FULL
    assert blocks.free_packed_pages == PACKED - 1
    assert blocks.capacity_pages == 2 * FULL + 2 * PACKED
    full = blocks.take(2 * FULL)
    assert blocks.free_full_pages == 0
    assert blocks.used_pages == len(packed) + len(full)
    assert {page // PACKED for page in packed}.isdisjoint(page // PACKED for page in full)
    assert all(page % PACKED < FULL for page in full)
    assert blocks.count_packed(packed + full) == len(packed)
    with pytest.raises(PoolExhausted):
        blocks.take(1)


def test_an_emptied_block_may_become_either() -> None:
    blocks = make_blocks(FULL)
    packed = blocks.take_packed(3)
    with pytest.raises(PoolExhausted):
        blocks.take(1)
    blocks.put(packed)
    assert (blocks.packed_blocks, blocks.packed_pages, len(blocks.empty_since)) == (0, 0, 1)
    full = blocks.take(FULL)
    with pytest.raises(PoolExhausted):
        blocks.take_packed(1)
    blocks.put(full)
    assert blocks.take_packed(PACKED) == [PageId(page) for page in range(PACKED)]
    assert blocks.commits == 1


def test_a_block_is_packed_only_with_room_for_all_of_it_below_the_limit() -> None:
    blocks = make_blocks(2 * FULL - 1)
    blocks.take(FULL)
    assert blocks.obtainable_packed_pages == 0
    with pytest.raises(PoolExhausted):
        blocks.take_packed(1)
    blocks.set_limit(2 * FULL)
    assert blocks.obtainable_packed_pages == PACKED
    blocks.take_packed(1)


def test_no_block_is_packed_while_each_holds_a_full_page() -> None:
    blocks = make_blocks(2 * FULL)
    pages = blocks.take(2 * FULL)
    blocks.put(pages[1:FULL] + pages[FULL + 1 :])
    assert blocks.free_full_pages == 2 * FULL - 2
    assert blocks.obtainable_packed_pages == 0
    (move,) = plan_emptying(blocks, lambda page: True, packed=False, count=1)
    blocks.take_these([move.target])
    blocks.put([move.source])
    assert blocks.obtainable_packed_pages == PACKED


def test_packed_pages_come_from_the_fullest_packed_block() -> None:
    blocks = make_blocks(3 * FULL)
    pages = blocks.take_packed(3 * PACKED)
    blocks.put(pages[:5])  # block 0: 5 free
    blocks.put(pages[PACKED : PACKED + 2])  # block 1: 2 free
    assert {page // PACKED for page in blocks.take_packed(2)} == {1}
    assert {page // PACKED for page in blocks.take_packed(1)} == {0}
    assert blocks.surplus_packed_blocks == blocks.surplus_full_blocks == 0


def test_a_device_without_memory_leaves_nothing_taken() -> None:
    backing = FakeBacking()
    blocks = make_blocks(3 * FULL, backing)
    blocks.take_packed(1)
    backing.refuse = True
    with pytest.raises(OutOfDeviceMemory):
        blocks.take_packed(PACKED)
    assert (blocks.packed_blocks, blocks.packed_pages) == (1, 1)
    assert len(blocks.take_packed(PACKED - 1)) == PACKED - 1


def test_moves_stay_within_a_format_and_count_for_both() -> None:
    blocks = make_blocks(6 * FULL)
    full, packed = blocks.take(3 * FULL), blocks.take_packed(3 * PACKED)
    blocks.put(full[1:FULL] + full[FULL + 1 : 2 * FULL])
    blocks.put(packed[1:PACKED] + packed[PACKED + 1 : 2 * PACKED])
    assert (blocks.surplus_full_blocks, blocks.surplus_packed_blocks) == (1, 1)
    assert blocks.surplus_blocks == 2
    assert blocks.fragmentation == pytest.approx(2 / 6)
    for kind in (False, True):
        (move,) = plan_moves(blocks, lambda page: True, 100, packed=kind)
        assert move.packed == kind
        assert (
            blocks.is_packed(move.source) == blocks.is_packed_block(move.target // PACKED) == kind
        )


def test_a_lowered_limit_is_exceeded_by_what_packed_blocks_take() -> None:
    blocks = make_blocks(3 * FULL)
    packed = blocks.take_packed(PACKED + 1)
    blocks.set_limit(FULL)
    assert blocks.taken_pages == 2 * FULL
    assert blocks.free_full_pages == -FULL
    assert blocks.obtainable_packed_pages == PACKED - 1
    blocks.put(packed[PACKED:])
    assert blocks.free_full_pages == 0


def test_the_mark_of_packed_pages_is_the_one_that_kernels_read() -> None:
    assert PACKED_PAGE == memd_kernels.formats.PACKED_PAGE


@given(
    pages_per_block=st.integers(1, 20),
    packed_page_bytes=st.integers(1, 40),
    block=st.integers(0, 1000),
    data=st.data(),
)
def test_pages_of_both_formats_lie_inside_their_block(
    pages_per_block: int, packed_page_bytes: int, block: int, data: st.DataObject
) -> None:
    page_bytes = 40
    layout = KVLayout(1, 1, 1, 1, 20, pages_per_block * page_bytes, packed_page_bytes)
    for packed, room in ((False, pages_per_block), (True, layout.packed_pages_per_block)):
        index = data.draw(st.integers(0, room - 1))
        page = PageId(block * layout.slots_per_block + index)
        assert layout.block_of(page) == block
        start = layout.page_offset_bytes(page, packed)
        end = start + layout.size_bytes(packed)
        assert block * layout.block_bytes <= start < end <= (block + 1) * layout.block_bytes
        entry = layout.table_entry(page, packed)
        assert bool(entry & PACKED_PAGE) == packed
        assert divmod(entry & ~PACKED_PAGE, room) == (block, index)


def test_without_packed_pages_ids_are_as_ever() -> None:
    layout = KVLayout(1, 1, 1, 1, 20, 120)
    assert layout.slots_per_block == layout.pages_per_block == 3
    assert layout.table_entry(PageId(7), packed=False) == 7
    assert layout.block_of(PageId(7)) == BlockId(2)
