"""Bytes of a sequence's KV, by hand and for the shapes that people run."""

from collections.abc import Callable

import pytest
from memd_kernels.formats import FormatName, PackedFormat

from memd.errors import RequestError
from memd.evaluate.accounting import footprint
from memd.evaluate.policy import KVFormat, KVPolicy, read_formats
from memd.pool.layout import KVLayout, plan_layout

MIB, GIB = 2**20, 2**30


def layout_of(num_layers: int, num_kv_heads: int, kv: FormatName | None = None) -> KVLayout:
    """Head dim 128, bfloat16, pages of 64 tokens, blocks near 16 MiB."""
    packed_page_bytes = None
    if kv is not None:
        packed_page_bytes = PackedFormat(kv, 64, 128).page_bytes(num_layers, num_kv_heads)
    return plan_layout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        element_bytes=2,
        page_tokens=64,
        granule_bytes=2 * MIB,
        target_block_bytes=16 * MIB,
        packed_page_bytes=packed_page_bytes,
    )


def test_full_pages() -> None:
    found = footprint(layout_of(32, 8), KVPolicy(), 1000)
    assert (found.full_pages, found.packed_pages) == (16, 0)
    assert found.kv_bytes == 16 * 64 * 32 * 2 * 8 * 128 * 2
    assert found.committed_bytes == found.kv_bytes
    assert found.used_share == 1


def test_packed_pages_full_ones_and_those_partly_filled() -> None:
    layout = KVLayout(1, 1, 8, 2, 16, 4096, packed_page_bytes=256)
    found = footprint(layout, KVPolicy("int8", 16, 16), 16 * 16 + 1)
    assert (found.full_pages, found.packed_pages) == (3, 14)
    assert found.kv_bytes == 3 * 512 + 14 * 256
    assert found.committed_bytes == 2 * 4096


def test_a_window_holds_what_it_sees() -> None:
    layout = KVLayout(1, 1, 8, 2, 16, 4096, packed_page_bytes=256)
    assert footprint(layout, KVPolicy(window=64), 1024).full_pages == 4
    assert footprint(layout, KVPolicy(window=65), 1024).full_pages == 4
    assert footprint(layout, KVPolicy(window=66), 1024).full_pages == 5
    assert footprint(layout, KVPolicy(window=5000), 1024).full_pages == 64
    assert footprint(layout, KVPolicy("int4", 128, 32, window=64), 1024).packed_pages == 2
    assert footprint(layout, KVPolicy("int4", 128, 128, window=64), 1024).packed_pages == 0


def test_sinks_are_held_besides_a_window() -> None:
    layout = KVLayout(1, 1, 8, 2, 16, 4096, packed_page_bytes=256)
    assert footprint(layout, KVPolicy(window=64, sinks=4), 1024).full_pages == 5
    assert footprint(layout, KVPolicy(window=64, sinks=17), 1024).full_pages == 6
    assert footprint(layout, KVPolicy(window=64, sinks=999), 1024).full_pages == 64
    assert footprint(layout, KVPolicy(window=64, sinks=4), 30).full_pages == 2
    with pytest.raises(RequestError, match="no window"):
        KVPolicy(sinks=4)


def test_a_layout_without_packed_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="no size of int8 pages"):
        footprint(KVLayout(1, 1, 8, 2, 16, 4096), KVPolicy("int8"), 1024)


def test_a_7b_model_holds_32768_tokens_in_int4_below_4_8_gib() -> None:
    found = footprint(layout_of(32, 32, "int4"), KVPolicy("int4"), 32768)
    assert found.full_pages == 4
    assert found.kv_bytes < found.committed_bytes < 4.8 * GIB


def test_int4_at_128k_tokens_is_3_5_times_less() -> None:
    layout = layout_of(32, 8, "int4")
    full = footprint(layout, KVPolicy(), 131072)
    assert full.kv_bytes / footprint(layout, KVPolicy("int4"), 131072).kv_bytes >= 3.5


@pytest.mark.parametrize("kv", ["full", "int8", "int4", "fp8"])
@pytest.mark.parametrize("heads", [8, 4, 2])
def test_committed_memory_is_used_at_256k_tokens(kv: KVFormat, heads: int) -> None:
    layout = layout_of(32, heads, None if kv == "full" else kv)
    assert footprint(layout, KVPolicy(kv), 262144).used_share >= 0.96


def test_formats_are_read_from_a_list() -> None:
    assert read_formats("full, int8,int4") == ["full", "int8", "int4"]


@pytest.mark.parametrize("text", ["int3", "", "full,", "INT8", "full,int8,full"])
def test_a_bad_list_of_formats(text: str) -> None:
    with pytest.raises(RequestError, match=r"none of full, int8, int4, fp8|twice") as caught:
        read_formats(text)
    assert caught.value.param == "kv"


@pytest.mark.parametrize(
    ("policy", "param"),
    [
        (lambda: KVPolicy(window=0), "window"),
        (lambda: KVPolicy(window=9, sinks=-1), "sinks"),
        (lambda: KVPolicy(budget=64, sinks=-1), "sinks"),
        (lambda: KVPolicy(recent_tokens=-1), "recent-tokens"),
        (lambda: KVPolicy(full_precision_tokens=-1), "full-precision-tokens"),
    ],
)
def test_numbers_below_their_least(policy: Callable[[], KVPolicy], param: str) -> None:
    with pytest.raises(RequestError, match="is below") as caught:
        policy()
    assert caught.value.param == param
