"""Divides a decode step whose page tables name packed pages too; see `memd_kernels.triton.plan`."""

import triton
import triton.language as tl

from memd_kernels.compile import CompileCase
from memd_kernels.plan import MIXED_ITEM_FIELDS
from memd_kernels.triton.unpack import PACKED_PAGE

SCANNED_ENTRIES = 1024  # of page tables at once
# What a tile costs to read, in eighths of a full one: it is the converting that costs.
EIGHTHS = {"int8": 5, "fp8": 5, "int4": 4}


@triton.jit
def own_start(groups, num_groups, row, page_tokens):
    """Tokens of each row that its group shares."""
    start = tl.zeros_like(row)
    for group in range(num_groups):
        first = tl.load(groups + group * 3)
        rows = tl.load(groups + group * 3 + 1)
        pages = tl.load(groups + group * 3 + 2)
        start = tl.where((row >= first) & (row < first + rows), pages * page_tokens, start)
    return start


@triton.jit
def _find_packed(page_table, table_stride, row, first, end, COLUMNS: tl.constexpr):
    """First and end column of the packed pages of each row, and how many there are."""
    lowest = end
    highest = tl.zeros_like(end)
    count = tl.zeros_like(end)
    for done in range(tl.min(first, 0), tl.max(end, 0), COLUMNS):
        column = done + tl.arange(0, COLUMNS)[None, :]
        known = (column >= first[:, None]) & (column < end[:, None])
        at = page_table + row.to(tl.int64)[:, None] * table_stride + column
        is_packed = tl.load(at, mask=known, other=0) >= PACKED_PAGE  # [ROWS, COLUMNS]
        lowest = tl.minimum(lowest, tl.min(tl.where(is_packed, column, 2**30), 1))
        highest = tl.maximum(highest, tl.max(tl.where(is_packed, column + 1, 0), 1))
        count += tl.sum(is_packed.to(tl.int32), 1)
    return lowest, highest, count


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_groups",
        "num_counters",
        "capacity",
        "target_items",
        "window",
        "sinks",
        "prefix_splits",
        "table_stride",
    ]
)
def plan_mixed_items(
    kv_lens,
    page_table,
    groups,
    items,
    counters,
    num_rows,
    num_groups,
    num_counters,
    capacity,
    target_items,
    window,
    sinks,
    page_tokens,
    prefix_splits,
    table_stride,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIELDS: tl.constexpr,
    EIGHTHS: tl.constexpr,
):
    """`_plan_items` for two formats: each row has items of full pages, and of packed ones; so do
    its sinks.

    Packed pages that lie together are left out of the items of full pages; where full ones lie
    between them both kinds of item go over all of them.
    """
    row = tl.arange(0, ROWS)
    real = row < num_rows
    length = tl.load(kv_lens + row, mask=real, other=0)
    shared = own_start(groups, num_groups, row, page_tokens)
    start = tl.maximum(tl.maximum(length - window, sinks), shared)
    first = start // TILE
    end = tl.where(start < length, tl.cdiv(length, TILE), first)
    end_column = tl.where(length > start, tl.cdiv(length, page_tokens), 0)
    lowest, highest, found = _find_packed(
        page_table, table_stride, row, start // page_tokens, end_column, COLUMNS
    )
    page_tiles = page_tokens // TILE
    packed_first = tl.maximum(lowest * page_tiles, first)
    packed_end = tl.minimum(highest * page_tiles, end)
    packed_tiles = tl.where(found > 0, packed_end - packed_first, 0)
    gap = tl.where(found == highest - lowest, packed_tiles, 0)
    full_tiles = end - first - gap
    leading = tl.minimum(length, sinks)
    sink_pages = tl.cdiv(leading, page_tokens)
    _, _, packed_sinks = _find_packed(
        page_table, table_stride, row, leading * 0, sink_pages, COLUMNS
    )
    full_sinks = (packed_sinks < sink_pages).to(tl.int32)
    sink_count = full_sinks + (packed_sinks > 0).to(tl.int32)

    # As many items as there are shares of all cost, and less than one more of each kind and row.
    cost = tl.sum(full_tiles * 8 + packed_tiles * EIGHTHS, 0)
    share = tl.maximum(tl.cdiv(cost, target_items), 8)
    packed_count = tl.where(real, tl.cdiv(packed_tiles, tl.cdiv(share, EIGHTHS)), 0)
    full_count = tl.where(real, tl.cdiv(full_tiles, tl.cdiv(share, 8)), 0)
    # A row with nothing to read has an item: it writes zeros.
    alone = real & (packed_count + sink_count == 0)
    full_count = tl.where(alone, tl.maximum(full_count, 1), full_count)
    own_count = full_count + packed_count
    count = own_count + sink_count
    item = tl.cumsum(count, 0) - count
    # Items of packed pages are the long ones: they begin first, and the others fill what is left.
    others = full_count + sink_count
    packed_at = tl.cumsum(packed_count, 0) - packed_count
    other_at = tl.sum(packed_count, 0) + tl.cumsum(others, 0) - others
    parts = tl.where(shared > 0, prefix_splits, 0)
    for index in range(tl.max(count, 0)):
        mine = index < count
        of_sinks = index >= own_count
        is_packed = tl.where(of_sinks, index >= own_count + full_sinks, index >= full_count)
        piece = tl.where(is_packed, index - full_count, index)
        pieces = tl.maximum(tl.where(is_packed, packed_count, full_count), 1)
        begin = tl.where(is_packed, packed_first, first)
        tiles = tl.where(is_packed, packed_tiles, full_tiles)
        at = tl.where(is_packed, packed_at + piece, other_at + piece)
        at = tl.where(of_sinks, other_at + full_count + index - own_count, at)
        record = items + at * FIELDS
        tl.store(record, row, mask=mine)
        stop = tl.where(of_sinks, tl.cdiv(leading, TILE), begin + tiles * (piece + 1) // pieces)
        begin = tl.where(of_sinks, 0, begin + tiles * piece // pieces)
        tl.store(record + 1, begin, mask=mine)
        tl.store(record + 2, stop, mask=mine)
        tl.store(record + 3, item, mask=mine)
        tl.store(record + 4, count, mask=mine)
        tl.store(record + 5, tl.where(of_sinks, leading, length), mask=mine)
        tl.store(record + 6, tl.where(of_sinks, 0, start), mask=mine)
        tl.store(record + 7, parts, mask=mine)
        tl.store(record + 8, is_packed.to(tl.int32), mask=mine)
        tl.store(record + 9, packed_first, mask=mine)
        tl.store(record + 10, tl.where(of_sinks, 0, gap), mask=mine)
        tl.store(record + 11, item + index, mask=mine)

    for unused in range(tl.sum(count, 0), capacity, ROWS):
        tl.store(items + (unused + row) * FIELDS, -1, mask=unused + row < capacity)
    for counter in range(0, num_counters, ROWS):
        tl.store(counters + counter + row, 0, mask=counter + row < num_counters)


def compile_cases() -> list[CompileCase]:
    """Plans for a full batch of 256 rows."""
    numbers = ("num_rows", "num_groups", "num_counters", "capacity", "target_items", "window")
    more = ("sinks", "page_tokens", "prefix_splits", "table_stride")
    pointers = ("kv_lens", "page_table", "groups", "items", "counters")
    signature = {**dict.fromkeys(pointers, "*i32:16"), **dict.fromkeys((*numbers, *more), "i32")}
    sizes = {"TILE": 64, "ROWS": 256, "COLUMNS": 4, "FIELDS": MIXED_ITEM_FIELDS, "EIGHTHS": 4}
    return [CompileCase(plan_mixed_items, signature, sizes)]
