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
from memd_kernels.sinks import check_sink_count
from memd_kernels.triton.plan_mixed import EIGHTHS, SCANNED_ENTRIES, own_start, plan_mixed_items

MAX_ROWS = 1024
MIN_VECTOR = 16
NO_WINDOW = NO_LIMIT = 2**31 - 1
SHARE_TOKENS = 256  # of an item, where shares of attention are wanted


@triton.jit
def _publish(counters):
    """What all threads have stored is there for others before the kernel ends.

    Attention reads a plan early: see `memd_kernels.triton.overlap`.
    """
    tl.debug_barrier()
    tl.atomic_add(counters, 0, sem="acq_rel")


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
        "most_tiles",
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
    sinks,
    page_tokens,
    prefix_splits,
    most_tiles,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    real = row < num_rows
    length = tl.load(kv_lens + row, mask=real, other=0)
    shared = own_start(groups, num_groups, row, page_tokens)
    start = tl.maximum(tl.maximum(length - window, sinks), shared)

    # An item is never longer than an equal share of all tiles, so there are at most target_items
    # full ones, and one more for each row, and one for its sinks, whose query is another. A row
    # with nothing to read has one: it writes zeros.
    first = start // TILE
    tiles = tl.where(start < length, tl.cdiv(length, TILE) - first, 0)
    share = tl.minimum(tl.maximum(tl.cdiv(tl.sum(tiles, 0), target_items), 1), most_tiles)
    leading = tl.minimum(length, sinks)
    sink_count = (leading > 0).to(tl.int32)
    own_count = tl.where(real, tl.maximum(tl.cdiv(tiles, share), 1 - sink_count), 0)
    count = own_count + sink_count
    item = tl.cumsum(count, 0) - count
    parts = tl.where(shared > 0, prefix_splits, 0)
    pieces = tl.maximum(own_count, 1)
    for index in range(tl.max(count, 0)):
        mine = index < count
        of_sinks = index >= own_count
        begin = first + tiles * index // pieces
        end = first + tiles * (index + 1) // pieces
        record = items + (item + index) * FIELDS
        tl.store(record, row, mask=mine)
        tl.store(record + 1, tl.where(of_sinks, 0, begin), mask=mine)
        tl.store(record + 2, tl.where(of_sinks, tl.cdiv(leading, TILE), end), mask=mine)
        tl.store(record + 3, item, mask=mine)
        tl.store(record + 4, count, mask=mine)
        tl.store(record + 5, tl.where(of_sinks, leading, length), mask=mine)
        tl.store(record + 6, tl.where(of_sinks, 0, start), mask=mine)
        tl.store(record + 7, parts, mask=mine)

    for unused in range(tl.sum(count, 0), capacity, ROWS):
        tl.store(items + (unused + row) * FIELDS, -1, mask=unused + row < capacity)
    # Zeros already, unless a launch was cut off.
    for counter in range(0, num_counters, ROWS):
        tl.store(counters + counter + row, 0, mask=counter + row < num_counters)
    _publish(counters)


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
    sinks: int = 0,
    page_table: Tensor | None = None,
    packed: PackedPages | None = None,
    shares: bool = False,
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
        sinks: leading tokens seen besides the window; see `Sinks`.
        page_table, packed: as for `decode_attention`, which is given the same; None: all pages are
            full.
        shares: `decode_attention` will be asked for shares: no item is longer than `SHARE_TOKENS`.
            Not with packed pages.

    Returns:
        A plan on the device of `kv_lens`, good until the lengths change or pages are packed.

    Raises:
        ValueError: a shape or dtype does not match the above, or packed pages or shares come
            without a page table, or with each other.
    """
    rows = len(kv_lens)
    if kv_lens.ndim != 1 or kv_lens.dtype != torch.int32 or rows > MAX_ROWS:
        raise ValueError(
            f"kv_lens is {tuple(kv_lens.shape)} {kv_lens.dtype}, not int32 of at most {MAX_ROWS}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it counts the token itself, so at least 1")
    check_sink_count(sinks, window)
    if (packed is not None or shares) and (
        page_table is None or page_table.dtype != torch.int32 or len(page_table) != rows
    ):
        raise ValueError(f"page_table is not int32 of [{rows}, max_pages]")
    config = _launch_of("decode_attention", rows, kv, kv_lens.device, packed)
    prefix = None if groups is None else _plan_prefix(groups, rows, kv, num_heads, packed)
    if shares and packed is not None:
        raise ValueError("shares of packed pages are not measured")
    return divide(config, kv_lens, kv, window, groups, prefix, sinks, page_table, packed, shares)


def divide(
    config: LaunchConfig,
    kv_lens: Tensor,
    kv: Tensor,
    window: int | None,
    groups: Tensor | None,
    prefix: PrefixPlan | None,
    sinks: int,
    page_table: Tensor | None,
    packed: PackedPages | None,
    shares: bool = False,
) -> DecodePlan:
    """`plan_decode` with a given launch, whose tiles are no longer than a page if any is packed."""
    rows, device = len(kv_lens), kv_lens.device
    kv_heads, page_tokens = kv.shape[4:6]
    target_items = max(config.splits * launch.multiprocessors(device) // kv_heads, 1)
    row_items = rows * (1 if packed is None else 2) * (2 if sinks else 1)
    capacity, most_tiles = row_items + target_items, NO_LIMIT
    if shares and page_table is not None:
        most_tiles = max(SHARE_TOKENS // config.block_n, 1)
        row_tiles = -(-page_table.shape[1] * page_tokens // config.block_n)
        capacity += rows * -(-row_tiles // most_tiles)
    fields = ITEM_FIELDS if packed is None else MIXED_ITEM_FIELDS
    items = torch.empty((capacity, fields), dtype=torch.int32, device=device)
    counters = torch.empty((rows + capacity) * kv_heads, dtype=torch.int32, device=device)
    numbers = (
        rows,
        0 if groups is None else len(groups),
        len(counters),
        capacity,
        target_items,
        NO_WINDOW if window is None else window,
        sinks,
        page_tokens,
        0 if prefix is None else prefix.splits,
    )
    padded_rows = launch.bucket(max(rows, MIN_VECTOR))
    constants = {"TILE": config.block_n, "ROWS": padded_rows, "FIELDS": fields, "num_warps": 4}
    shared = kv_lens if groups is None else groups
    if packed is None or page_table is None:
        _plan_items[(1,)](kv_lens, shared, items, counters, *numbers, most_tiles, **constants)
    else:
        plan_mixed_items[(1,)](
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
    config = _launch_of("shared_prefix_attention", rows, kv, groups.device, packed)
    programs = config.splits * launch.multiprocessors(groups.device)
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
) -> LaunchConfig:
    """Launch of a kernel; its splits are programs for each multiprocessor."""
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
    if packed is not None:  # a tile is of one page, so of one format, and whole units of it
        tile = min(max(config.block_n, packed.format.unit_tokens), kv.shape[5])
        config = replace(config, block_n=tile)
    return config


def compile_cases() -> list[CompileCase]:
    """Plans for a full batch of 256 rows."""
    numbers = ("num_groups", "capacity", "page_tokens")
    more = ("num_rows", "num_counters", "target_items", "window", "sinks", "prefix_splits")
    pointers = ("kv_lens", "groups", "items", "counters")
    items = {**dict.fromkeys(pointers, "*i32:16"), **dict.fromkeys((*numbers, *more), "i32")}
    items["most_tiles"] = "i32"
    tiles = {**dict.fromkeys(("groups", "row_tiles"), "*i32:16"), **dict.fromkeys(numbers, "i32")}
    return [
        CompileCase(_plan_items, items, {"TILE": 64, "ROWS": 256, "FIELDS": ITEM_FIELDS}),
        CompileCase(_plan_row_tiles, tiles, {"TILE_ROWS": 16, "FIELDS": TILE_FIELDS}, 1),
    ]
