"""Divides a decode step among programs, on the device and without knowing the lengths on the host.

The tiles of all sequences together are cut into items of nearly equal length, so that one long
sequence beside many short ones does not hold the step up. A window and a shared prefix only move
the first token that a row reads.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from memd_kernels import launch
from memd_kernels.compile import CompileCase
from memd_kernels.formats import PackedPages
from memd_kernels.launch import LaunchConfig
from memd_kernels.plan import (
    ITEM_FIELDS,
    MIXED_ITEM_FIELDS,
    TILE_FIELDS,
    DecodePlan,
    PrefixPlan,
)
from memd_kernels.triton.unpack import PACKED_PAGE

MAX_ROWS = 1024
MIN_VECTOR = 16
NO_WINDOW = 2**31 - 1
SCANNED_ENTRIES = 1024  # of page tables at once
# What a tile costs to read, in eighths of a full one: it is the converting that costs.
EIGHTHS = {"int8": 5, "fp8": 5, "int4": 4}


@triton.jit
def _own_start(groups, num_groups, row, page_tokens):
    """Tokens of each row that its group shares."""
    start = tl.zeros_like(row)
    for group in range(num_groups):
        first = tl.load(groups + group * 3)
        rows = tl.load(groups + group * 3 + 1)
        pages = tl.load(groups + group * 3 + 2)
        start = tl.where((row >= first) & (row < first + rows), pages * page_tokens, start)
    return start


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_groups",
        "num_counters",
        "capacity",
        "target_items",
        "window",
        "prefix_splits",
    ]
)
def _plan_items(
    kv_lens,
    groups,
    items,
    counters,
    num_rows,
    num_groups,
    num_counters,
    capacity,
    target_items,
    window,
    page_tokens,
    prefix_splits,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    real = row < num_rows
    length = tl.load(kv_lens + row, mask=real, other=0)
    shared = _own_start(groups, num_groups, row, page_tokens)
    start = tl.maximum(tl.maximum(length - window, 0), shared)

    # An item is never longer than an equal share of all tiles, so there are at most target_items
    # full ones, and one more for each row. A row with nothing to read has one: it writes zeros.
    first = start // TILE
    tiles = tl.maximum(tl.cdiv(length, TILE) - first, 0)
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), target_items), 1)
    count = tl.where(real, tl.maximum(tl.cdiv(tiles, share), 1), 0)
    item = tl.cumsum(count, 0) - count
    parts = tl.where(shared > 0, prefix_splits, 0)
    pieces = tl.maximum(count, 1)
    for index in range(tl.max(count, 0)):
        mine = index < count
        record = items + (item + index) * FIELDS
        tl.store(record, row, mask=mine)
        tl.store(record + 1, first + tiles * index // pieces, mask=mine)
        tl.store(record + 2, first + tiles * (index + 1) // pieces, mask=mine)
        tl.store(record + 3, item, mask=mine)
        tl.store(record + 4, count, mask=mine)
        tl.store(record + 5, length, mask=mine)
        tl.store(record + 6, start, mask=mine)
        tl.store(record + 7, parts, mask=mine)

    for unused in range(tl.sum(count, 0), capacity, ROWS):
        tl.store(items + (unused + row) * FIELDS, -1, mask=unused + row < capacity)
    # Zeros already, unless a launch was cut off.
    for counter in range(0, num_counters, ROWS):
        tl.store(counters + counter + row, 0, mask=counter + row < num_counters)


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
        "prefix_splits",
        "table_stride",
    ]
)
def _plan_mixed_items(
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
    page_tokens,
    prefix_splits,
    table_stride,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIELDS: tl.constexpr,
    EIGHTHS: tl.constexpr,
):
    """`_plan_items` for two formats: each row has items of full pages, and of packed ones.

    Packed pages that lie together are left out of the items of full pages; where full ones lie
    between them both kinds of item go over all of them.
    """
    row = tl.arange(0, ROWS)
    real = row < num_rows
    length = tl.load(kv_lens + row, mask=real, other=0)
    shared = _own_start(groups, num_groups, row, page_tokens)
    start = tl.maximum(tl.maximum(length - window, 0), shared)
    first = start // TILE
    end = tl.maximum(tl.cdiv(length, TILE), first)
    end_column = tl.where(length > start, tl.cdiv(length, page_tokens), 0)
    lowest, highest, count = _find_packed(
        page_table, table_stride, row, start // page_tokens, end_column, COLUMNS
    )
    page_tiles = page_tokens // TILE
    packed_first = tl.maximum(lowest * page_tiles, first)
    packed_end = tl.minimum(highest * page_tiles, end)
    packed_tiles = tl.where(count > 0, packed_end - packed_first, 0)
    gap = tl.where(count == highest - lowest, packed_tiles, 0)
    full_tiles = end - first - gap

    # As many items as there are shares of all cost, and less than one more of each kind and row.
    cost = tl.sum(full_tiles * 8 + packed_tiles * EIGHTHS, 0)
    share = tl.maximum(tl.cdiv(cost, target_items), 8)
    packed_count = tl.where(real, tl.cdiv(packed_tiles, tl.cdiv(share, EIGHTHS)), 0)
    full_count = tl.where(real, tl.cdiv(full_tiles, tl.cdiv(share, 8)), 0)
    # A row with nothing to read has an item: it writes zeros.
    full_count = tl.where(real & (packed_count == 0), tl.maximum(full_count, 1), full_count)
    count = full_count + packed_count
    item = tl.cumsum(count, 0) - count
    parts = tl.where(shared > 0, prefix_splits, 0)
    for index in range(tl.max(count, 0)):
        mine = index < count
        is_packed = index >= full_count
        piece = tl.where(is_packed, index - full_count, index)
        pieces = tl.maximum(tl.where(is_packed, packed_count, full_count), 1)
        begin = tl.where(is_packed, packed_first, first)
        tiles = tl.where(is_packed, packed_tiles, full_tiles)
        record = items + (item + index) * FIELDS
        tl.store(record, row, mask=mine)
        tl.store(record + 1, begin + tiles * piece // pieces, mask=mine)
        tl.store(record + 2, begin + tiles * (piece + 1) // pieces, mask=mine)
        tl.store(record + 3, item, mask=mine)
        tl.store(record + 4, count, mask=mine)
        tl.store(record + 5, length, mask=mine)
        tl.store(record + 6, start, mask=mine)
        tl.store(record + 7, parts, mask=mine)
        tl.store(record + 8, is_packed.to(tl.int32), mask=mine)
        tl.store(record + 9, packed_first, mask=mine)
        tl.store(record + 10, gap, mask=mine)

    for unused in range(tl.sum(count, 0), capacity, ROWS):
        tl.store(items + (unused + row) * FIELDS, -1, mask=unused + row < capacity)
    for counter in range(0, num_counters, ROWS):
        tl.store(counters + counter + row, 0, mask=counter + row < num_counters)


@triton.jit(do_not_specialize=["num_groups", "capacity"])
def _plan_row_tiles(
    groups,
    row_tiles,
    num_groups,
    capacity,
    page_tokens,
    TILE_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    used = 0
    for group in range(num_groups):
        first = tl.load(groups + group * 3)
        rows = tl.load(groups + group * 3 + 1)
        shared = tl.load(groups + group * 3 + 2) * page_tokens
        rows = tl.where(shared > 0, rows, 0)
        for done in range(0, rows, TILE_ROWS):
            record = row_tiles + used * FIELDS
            tl.store(record, first + done)
            tl.store(record + 1, tl.minimum(rows - done, TILE_ROWS))
            tl.store(record + 2, shared)
            used += 1
    for unused in range(used, capacity):
        tl.store(row_tiles + unused * FIELDS + 1, 0)


def plan_decode(
    kv_lens: Tensor,
    kv: Tensor,
    num_heads: int,
    window: int | None,
    groups: Tensor | None = None,
    page_table: Tensor | None = None,
    packed: PackedPages | None = None,
) -> DecodePlan:
    """Divide one step's decode attention. One plan serves all layers that have the same window.

    Shapes:
        kv_lens: [B], int32, lengths in tokens with the new token; 0: a row of padding. B at most
            1,024.
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim]; only
            its shape and dtype matter.
        num_heads: query heads.
        window: tokens that a token sees, itself included; None: all.
        groups: as for `shared_prefix_attention`; None: for `decode_attention`.
        page_table, packed: as for `decode_attention`, which is given the same; None: all pages are
            full.

    Returns:
        A plan on the device of `kv_lens`, good until the lengths change or pages are packed.

    Raises:
        ValueError: a shape or dtype does not match the above, or packed pages come without a page
            table.
    """
    rows = len(kv_lens)
    if kv_lens.ndim != 1 or kv_lens.dtype != torch.int32 or rows > MAX_ROWS:
        raise ValueError(
            f"kv_lens is {tuple(kv_lens.shape)} {kv_lens.dtype}, not int32 of at most {MAX_ROWS}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it counts the token itself, so at least 1")
    if packed is not None and (
        page_table is None or page_table.dtype != torch.int32 or len(page_table) != rows
    ):
        raise ValueError(f"page_table is not int32 of [{rows}, max_pages]")
    device = kv_lens.device
    kv_heads, page_tokens = kv.shape[4:6]
    config, programs = _launch_of("decode_attention", rows, kv, device, packed)
    target_items = max(programs // kv_heads, 1)
    prefix = None if groups is None else _plan_prefix(groups, rows, kv, num_heads, packed)
    capacity, fields = rows + target_items, ITEM_FIELDS
    if packed is not None:
        capacity, fields = 2 * rows + target_items, MIXED_ITEM_FIELDS
    items = torch.empty((capacity, fields), dtype=torch.int32, device=device)
    counters = torch.empty(rows * kv_heads, dtype=torch.int32, device=device)
    numbers = (
        rows,
        0 if groups is None else len(groups),
        len(counters),
        capacity,
        target_items,
        NO_WINDOW if window is None else window,
        page_tokens,
        0 if prefix is None else prefix.splits,
    )
    padded_rows = launch.bucket(max(rows, MIN_VECTOR))
    constants = {"TILE": config.block_n, "ROWS": padded_rows, "FIELDS": fields, "num_warps": 4}
    shared = kv_lens if groups is None else groups
    if packed is None or page_table is None:
        _plan_items[(1,)](kv_lens, shared, items, counters, *numbers, **constants)
    else:
        _plan_mixed_items[(1,)](
            kv_lens,
            page_table,
            shared,
            items,
            counters,
            *numbers,
            page_table.stride(0),
            COLUMNS=max(SCANNED_ENTRIES // padded_rows, 1),
            EIGHTHS=EIGHTHS[packed.format.name],
            **constants,
        )
    return DecodePlan(items, counters, config, prefix)


def _plan_prefix(
    groups: Tensor, rows: int, kv: Tensor, num_heads: int, packed: PackedPages | None
) -> PrefixPlan:
    if groups.ndim != 2 or groups.shape[1] != 3 or groups.dtype != torch.int32:
        raise ValueError(
            f"groups is {tuple(groups.shape)} {groups.dtype}, not int32 of [capacity, 3]"
        )
    kv_heads, page_tokens = kv.shape[4:6]
    config, programs = _launch_of("shared_prefix_attention", rows, kv, groups.device, packed)
    tile_rows = max(config.block_m // launch.bucket(num_heads // kv_heads), 1)
    full_tiles = -(-rows // tile_rows)
    splits = max(programs // max(full_tiles * kv_heads, 1), 1)
    capacity = min(full_tiles + len(groups), rows)
    row_tiles = torch.empty((capacity, TILE_FIELDS), dtype=torch.int32, device=groups.device)
    _plan_row_tiles[(1,)](
        groups,
        row_tiles,
        len(groups),
        capacity,
        page_tokens,
        TILE_ROWS=tile_rows,
        FIELDS=TILE_FIELDS,
        num_warps=1,
    )
    return PrefixPlan(row_tiles, splits if packed is None else 2 * splits, config)


def _launch_of(
    kernel: str, rows: int, kv: Tensor, device: torch.device, packed: PackedPages | None
) -> tuple[LaunchConfig, int]:
    """Launch of a kernel, and the number of programs that it aims at."""
    format: str = "half" if packed is None else packed.format.name
    if kv.dtype == torch.float32:
        format = "float32"
    config = launch.config(
        kernel,
        launch.capability(device),
        head_dim=launch.bucket(kv.shape[6]),
        format=format,
        rows=launch.bucket(rows),
    )
    if packed is not None:  # a tile is of one page, so of one format
        config = replace(config, block_n=min(config.block_n, kv.shape[5]))
    return config, config.splits * launch.multiprocessors(device)


def compile_cases() -> list[CompileCase]:
    """Plans for a full batch of 256 rows."""
    numbers = ("num_groups", "capacity", "page_tokens")
    more = ("num_rows", "num_counters", "target_items", "window", "prefix_splits")
    pointers = ("kv_lens", "groups", "items", "counters")
    items = {**dict.fromkeys(pointers, "*i32:16"), **dict.fromkeys((*numbers, *more), "i32")}
    tiles = {**dict.fromkeys(("groups", "row_tiles"), "*i32:16"), **dict.fromkeys(numbers, "i32")}
    mixed = {**items, "page_table": "*i32:16", "table_stride": "i32"}
    sizes = {"TILE": 64, "ROWS": 256, "COLUMNS": 4, "FIELDS": MIXED_ITEM_FIELDS, "EIGHTHS": 4}
    return [
        CompileCase(_plan_mixed_items, mixed, sizes),
        CompileCase(_plan_items, items, {"TILE": 64, "ROWS": 256, "FIELDS": ITEM_FIELDS}),
        CompileCase(_plan_row_tiles, tiles, {"TILE_ROWS": 16, "FIELDS": TILE_FIELDS}, 1),
    ]
