"""Byte arithmetic of pages and blocks."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from memd.pool.layout import KVLayout, choose_block_bytes, plan_layout
from memd.types import PageId

MIB = 2**20


def test_block_of_an_8b_model_is_16_mib_without_waste() -> None:
    layout = plan_layout(
        num_layers=32,
        num_kv_heads=8,
        head_dim=128,
        element_bytes=2,
        page_tokens=16,
        granule_bytes=2 * MIB,
        target_block_bytes=16 * 10**6,
    )
    assert layout.block_bytes == 16 * MIB
    assert layout.pages_per_block == 8
    assert layout.waste_bytes == 0


def test_a_page_larger_than_the_target_gets_a_block_of_its_own() -> None:
    assert choose_block_bytes(41 * MIB, 2 * MIB, 16 * MIB) == 42 * MIB


@given(
    page_bytes=st.integers(1, 40 * MIB),
    granule_bytes=st.sampled_from([4096, 2 * MIB]),
    target_bytes=st.integers(4 * MIB, 32 * MIB),
)
def test_blocks_are_whole_granules_with_a_page_at_least(
    page_bytes: int, granule_bytes: int, target_bytes: int
) -> None:
    size = choose_block_bytes(page_bytes, granule_bytes, target_bytes)
    assert size % granule_bytes == 0
    assert size >= page_bytes
    if page_bytes <= target_bytes * 3 // 4:
        assert target_bytes * 3 // 4 <= size <= max(target_bytes * 5 // 4, granule_bytes)
        waste = size % page_bytes / size
        for other in range(
            -(-(target_bytes * 3 // 4) // granule_bytes) * granule_bytes,
            target_bytes * 5 // 4,
            granule_bytes * 7,
        ):
            assert waste <= other % page_bytes / other or other < page_bytes


@given(
    pages_per_block=st.integers(1, 50),
    waste=st.integers(0, 100),
    page=st.integers(0, 2**40),
)
def test_pages_lie_inside_their_block(pages_per_block: int, waste: int, page: int) -> None:
    page_bytes = 2 * 3 * 64 * 2 * 16 * 30
    block_bytes = pages_per_block * page_bytes + min(waste, page_bytes - 1)
    layout = KVLayout(30, 3, 64, 2, 16, block_bytes)
    assert layout.page_bytes == page_bytes
    assert layout.pages_per_block == pages_per_block
    start = layout.page_offset_bytes(PageId(page))
    assert layout.block_of(PageId(page)) == start // block_bytes
    assert (start + page_bytes - 1) // block_bytes == start // block_bytes
    assert layout.page_offset_bytes(PageId(page + 1)) >= start + page_bytes


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (1100, 69)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert KVLayout(1, 1, 1, 2, 16, 4096).pages_for(tokens) == pages


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("layers", "heads"), [(32, 8), (24, 2), (30, 3), (28, 4)])
def test_blocks_suit_full_and_packed_pages(bits: int, layers: int, heads: int) -> None:
    page_bytes = layers * 2 * heads * 128 * 2 * 64
    packed_page_bytes = layers * heads * (2 * 64 * 128 * bits // 8 + 2 * 128 * 3 + 64 * 3)
    size = choose_block_bytes(page_bytes, 2 * MIB, 16 * MIB, packed_page_bytes)
    assert size % (2 * MIB) == 0
    assert 12 * MIB <= size <= 64 * MIB
    layout = KVLayout(layers, heads, 128, 2, 64, size, packed_page_bytes)
    assert layout.waste_bytes / size <= 0.03
    assert 1 - layout.packed_pages_per_block * packed_page_bytes / size <= 0.03


def test_blocks_of_large_pages_hold_whole_pages_of_both_sizes() -> None:
    size = choose_block_bytes(20 * MIB, 2 * MIB, 16 * MIB, int(10.6 * MIB))
    assert size <= 80 * MIB
    # A block of one page would leave half of it over for packed ones.
    assert size % int(10.6 * MIB) / size < 0.1
    assert size % (20 * MIB) / size < 0.1


def test_without_packed_pages_a_block_holds_none() -> None:
    assert KVLayout(1, 1, 1, 1, 16, 4096).packed_pages_per_block == 0
