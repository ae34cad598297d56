"""Decode attention where groups of sequences share their leading pages, in Triton.

Two launches. The first attends to the shared prefixes with the query heads of many sequences in
one tile, so that a prefix is read once for them all, and leaves its parts in scratch memory. The
second is the decode kernel over what each sequence has of its own; it puts all parts together.
"""

import triton
import triton.language as tl
from torch import Tensor

from memd_kernels import launch
from memd_kernels.compile import CompileCase
from memd_kernels.formats import FormatName, PackedPages
from memd_kernels.plan import TILE_FIELDS, DecodePlan, PrefixPlan
from memd_kernels.sinks import Sinks, check_sinks
from memd_kernels.triton.attend import (
    LOG2_E,
    MIN_SIDE,
    attend_tiles,
    normalise,
    padded,
    precision,
)
from memd_kernels.triton.attend_packed import attend_packed, load_queries, store_columns
from memd_kernels.triton.decode import check_decode, launch_decode, scratch
from memd_kernels.triton.packed_launch import packed_arguments, packed_constants, packed_signature
from memd_kernels.triton.plan import plan_decode
from memd_kernels.triton.unpack import UNIT_TOKENS


@triton.jit(do_not_specialize=["layer", "first_slot", "splits", "window", "sinks", "table_stride"])
def _attend_prefix(
    q,
    kv,
    page_table,
    kv_lens,
    row_tiles,
    parts,
    logs,
    layer,
    scale,
    first_slot,
    splits,
    window,
    sinks,
    q_row_stride,
    q_head_stride,
    table_stride,
    block_stride,
    page_stride,
    layer_stride,
    packed,
    packed_block,
    packed_page,
    packed_layer,
    FIELDS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED_PER_BLOCK: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
    FAST: tl.constexpr,
):
    head = tl.program_id(0)
    split = tl.program_id(1)
    record = row_tiles + tl.program_id(2) * FIELDS
    first_row = tl.load(record)
    num_rows = tl.load(record + 1)
    shared = tl.load(record + 2)
    if num_rows == 0:
        return

    # Row of the tile = sequence, query head of this KV head; heads are padded to a power of two.
    member = tl.arange(0, ROWS) // HEADS
    query_head = tl.arange(0, ROWS) % HEADS
    column = tl.arange(0, DIM)
    real_row = (member < num_rows) & (query_head < GROUP)
    real = real_row[:, None] & (column < HEAD_DIM)[None, :]
    row = (first_row + member).to(tl.int64)
    query_at = q + row * q_row_stride + (head * GROUP + query_head) * q_head_stride
    row_start = row
    if WINDOW:
        row_start = tl.load(kv_lens + row, mask=member < num_rows, other=0) - window
        row_start = tl.maximum(row_start, sinks)  # which the decode kernel sees to
    slot = first_slot + row * splits + split
    at = (slot * KV_HEADS + head) * GROUP + query_head
    table = page_table + first_row.to(tl.int64) * table_stride

    tiles = tl.cdiv(shared, TILE)
    MIXED: tl.constexpr = FORMAT != "full"
    is_packed = 0
    if MIXED:  # every second part is of packed pages
        is_packed = split % 2
        split = split // 2
        splits = splits // 2
    first_tile = tiles * split // splits
    end_tile = tiles * (split + 1) // splits
    if is_packed == 0:
        query = tl.load(query_at[:, None] + column[None, :], mask=real, other=0.0)  # [ROWS, DIM]
        HEAD_NUMEL: tl.constexpr = PAGE_TOKENS * HEAD_DIM
        total, largest, weight = attend_tiles(
            query,
            kv + layer.to(tl.int64) * layer_stride + head * HEAD_NUMEL,
            table,
            first_tile,
            end_tile,
            0,
            shared,
            row_start,
            scale,
            block_stride,
            page_stride,
            KV_HEADS * HEAD_NUMEL,
            PAGES_PER_BLOCK,
            PAGE_TOKENS,
            HEAD_DIM,
            TILE,
            WINDOW,
            PRECISION,
            0,
            0,
            MIXED,
            2 if MIXED else None,
        )
        mean, log = normalise(total, largest, weight)
        tl.store(parts + at[:, None] * HEAD_DIM + column[None, :], mean, mask=real)
        tl.store(logs + at, log, mask=real_row)
    elif MIXED:
        UNIT: tl.constexpr = min(UNIT_TOKENS, PAGE_TOKENS)
        WIDE: tl.constexpr = q.dtype.element_ty == tl.float32
        queries = load_queries(query_at, real_row, FORMAT, HEAD_DIM, DIM, WIDE)
        packed_mean, packed_log = attend_packed(
            queries,
            packed + layer.to(tl.int64) * packed_layer + head * HEAD_BYTES,
            table,
            first_tile * (TILE // UNIT),
            end_tile * (TILE // UNIT),
            0,
            shared,
            row_start,
            scale,
            packed_block,
            packed_page,
            PACKED_PER_BLOCK,
            PAGE_TOKENS,
            GROUP_TOKENS,
            HEAD_DIM,
            DIM,
            UNIT,
            FORMAT,
            PARTS,
            FAST,
            WINDOW,
            PRECISION,
        )
        store_columns(parts + at * HEAD_DIM, packed_mean, real_row, HEAD_DIM)
        tl.store(logs + at, packed_log, mask=real_row)


def shared_prefix_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    kv_lens: Tensor,
    groups: Tensor,
    scale: float,
    window: int | None,
    plan: DecodePlan | None = None,
    sinks: Sinks | None = None,
    packed: PackedPages | None = None,
) -> Tensor:
    """Attend with the last token of each sequence, reading pages that a group shares once.

    As `memd_kernels.reference.shared_prefix_attention`, except that contents of tensors are not
    checked: that would wait for the device. `groups` costs idle programs for each entry that is
    not used, so its capacity should be near what is needed.

    Raises:
        ValueError: a shape, dtype or layout does not fit, the device has no instructions for the
            page format, or the plan was made without groups, for another batch size or for other
            formats of pages.

    Source:
        Attention by parts and log-sum-exp, as cascade inference does; the kernels are memd's.
    """
    check_decode(q, kv, layer, page_table, kv_lens, packed)
    count = check_sinks(sinks, q, window)
    rows, heads, _ = q.shape
    if plan is None:
        plan = plan_decode(kv_lens, kv, heads, window, groups, count, page_table, packed)
    if plan.prefix is None:
        raise ValueError("the plan was made without groups")
    first_slot = len(plan.items)
    parts, logs = scratch(q, first_slot + rows * plan.prefix.splits)
    _launch_prefix(
        q,
        kv,
        layer,
        page_table,
        kv_lens,
        scale,
        window,
        count,
        plan.prefix,
        parts,
        logs,
        first_slot,
        packed,
    )
    return launch_decode(q, kv, layer, page_table, scale, plan, parts, logs, sinks, packed)


def _launch_prefix(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
    sinks: int,
    prefix: PrefixPlan,
    parts: Tensor,
    logs: Tensor,
    first_slot: int,
    packed: PackedPages | None,
) -> None:
    heads, dim = q.shape[1:]
    kv_heads = kv.shape[4]
    group = launch.bucket(heads // kv_heads)
    _attend_prefix[(kv_heads, prefix.splits, len(prefix.row_tiles))](
        q,
        kv,
        page_table,
        kv_lens,
        prefix.row_tiles,
        parts,
        logs,
        layer,
        scale * LOG2_E,
        first_slot,
        prefix.splits,
        0 if window is None else window,
        sinks,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        *kv.stride()[:3],
        FIELDS=TILE_FIELDS,
        PAGES_PER_BLOCK=kv.shape[1],
        PAGE_TOKENS=kv.shape[5],
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=dim,
        TILE=prefix.config.block_n,
        ROWS=max(prefix.config.block_m, MIN_SIDE),
        DIM=padded(dim),
        HEADS=group,
        WINDOW=window is not None,
        PRECISION=precision(q.dtype),
        num_warps=prefix.config.num_warps,
        num_stages=prefix.config.num_stages,
        **packed_arguments(packed, kv),
    )


def compile_cases() -> list[CompileCase]:
    """The prefix pass for the shapes of an 8B and a 135M model, and with a window."""
    signature = {
        **dict.fromkeys(("q", "kv"), "*bf16:16"),
        **dict.fromkeys(("page_table", "kv_lens", "row_tiles"), "*i32:16"),
        **dict.fromkeys(("parts", "logs"), "*fp32:16"),
        "scale": "fp32",
        **dict.fromkeys(("layer", "first_slot", "splits", "window"), "i32"),
        **dict.fromkeys(("sinks", "table_stride"), "i32"),
        **dict.fromkeys(("q_row_stride", "q_head_stride"), "i32:16"),
        **dict.fromkeys(("block_stride", "page_stride", "layer_stride"), "i64:16"),
    }

    def case(
        dim: int,
        group: int,
        page_tokens: int,
        tile: int,
        window: bool,
        packed: FormatName | None = None,
    ) -> CompileCase:
        constants = {
            "FIELDS": TILE_FIELDS,
            "PAGES_PER_BLOCK": 128,
            "PAGE_TOKENS": page_tokens,
            "KV_HEADS": 8,
            "GROUP": group,
            "HEAD_DIM": dim,
            "TILE": tile,
            "ROWS": 64 if packed is None else 32,
            "DIM": padded(dim),
            "HEADS": launch.bucket(group),
            "WINDOW": window,
            "PRECISION": "tf32",
            **packed_constants(packed, page_tokens, dim),
        }
        types = {**signature, **packed_signature(packed)}
        return CompileCase(
            _attend_prefix, types, constants, 4, 3 if dim <= 128 and packed is None else 2
        )

    return [
        case(128, 4, 64, 64, False),
        case(128, 4, 16, 64, True),
        case(256, 8, 64, 32, False),
        case(128, 4, 64, 64, True, "int4"),
    ]
