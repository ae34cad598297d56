"""The kernel of `decode_attention` in Triton.

A program attends to one item of the plan (a run of tiles of one sequence) with all query heads of
one KV head. Rows with one item are done then; of the others each item leaves its part in scratch
memory, and whichever program comes last puts the parts of the row together, in their order.
"""

import triton
import triton.language as tl

from memd_kernels import launch
from memd_kernels.compile import CompileCase
from memd_kernels.formats import FormatName
from memd_kernels.plan import ITEM_FIELDS, MIXED_ITEM_FIELDS
from memd_kernels.triton.attend import MIN_SIDE, attend_tiles, combine, normalise, padded
from memd_kernels.triton.attend_packed import attend_packed, load_query_halves, store_halves
from memd_kernels.triton.unpack import packed_constants, packed_signature

COMBINED_ELEMENTS = 4096  # of parts that a warp reads at once: half of its registers


@triton.jit(do_not_specialize=["layer", "prefix_slots", "table_stride", "sinks"])
def decode_kernel(
    q,
    sink_q,
    kv,
    page_table,
    items,
    counters,
    parts,
    logs,
    output,
    layer,
    scale,
    prefix_slots,
    sinks,
    q_row_stride,
    q_head_stride,
    sink_row_stride,
    sink_head_stride,
    table_stride,
    block_stride,
    page_stride,
    layer_stride,
    packed,
    packed_block,
    packed_page,
    packed_layer,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    SINKS: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED_PER_BLOCK: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
    FAST: tl.constexpr,
):
    head = tl.program_id(0)
    item = tl.program_id(1)
    record = items + item * FIELDS
    row = tl.load(record)
    if row < 0:
        return
    first_item = tl.load(record + 3)
    count = tl.load(record + 4)
    prefix_count = tl.load(record + 7)

    query_head = tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    real_head = query_head < GROUP
    real = real_head[:, None] & (column < HEAD_DIM)[None, :]
    query_at = q + row.to(tl.int64) * q_row_stride + (head * GROUP + query_head) * q_head_stride
    start = tl.load(record + 6)
    stop = tl.load(record + 5)
    if SINKS:  # an item that begins before the end of the sinks is theirs
        sink_at = sink_q + row.to(tl.int64) * sink_row_stride
        sink_at += (head * GROUP + query_head) * sink_head_stride
        query_at = tl.where(start < sinks, sink_at, query_at)
    table = page_table + row.to(tl.int64) * table_stride
    out = output + (row.to(tl.int64) * KV_HEADS + head) * GROUP * HEAD_DIM
    part_at = (item.to(tl.int64) * KV_HEADS + head) * GROUP + query_head
    alone = count + prefix_count == 1
    MIXED: tl.constexpr = FORMAT != "full"
    is_packed, gap_at, gap = 0, 0, 0
    if MIXED:
        is_packed = tl.load(record + 8)
        gap_at = tl.load(record + 9)
        gap = tl.load(record + 10)
    if is_packed == 0:
        query = tl.load(query_at[:, None] + column[None, :], mask=real, other=0.0)  # [ROWS, DIM]
        HEAD_NUMEL: tl.constexpr = PAGE_TOKENS * HEAD_DIM
        total, largest, weight = attend_tiles(
            query,
            kv + layer.to(tl.int64) * layer_stride + head * HEAD_NUMEL,
            table,
            tl.load(record + 1),
            tl.load(record + 2),
            start,
            stop,
            0,
            scale,
            block_stride,
            page_stride,
            KV_HEADS * HEAD_NUMEL,
            PAGES_PER_BLOCK,
            PAGE_TOKENS,
            HEAD_DIM,
            TILE,
            False,
            PRECISION,
            gap_at,
            gap,
            MIXED,
        )
        mean, log = normalise(total, largest, weight)
        if alone:
            out_at = query_head[:, None] * HEAD_DIM + column[None, :]
            tl.store(out + out_at, mean.to(output.dtype.element_ty), mask=real)
        else:
            tl.store(parts + part_at[:, None] * HEAD_DIM + column[None, :], mean, mask=real)
            tl.store(logs + part_at, log, mask=real_head)
    elif MIXED:
        PACKED_TILE: tl.constexpr = min(TILE, GROUP_TOKENS)
        WIDE: tl.constexpr = q.dtype.element_ty == tl.float32
        low, high = load_query_halves(query_at, real_head, HEAD_DIM, DIM, WIDE)
        low, high, largest, weight = attend_packed(
            low,
            high,
            packed + layer.to(tl.int64) * packed_layer + head * HEAD_BYTES,
            table,
            tl.load(record + 1) * (TILE // PACKED_TILE),
            tl.load(record + 2) * (TILE // PACKED_TILE),
            start,
            stop,
            0,
            scale,
            packed_block,
            packed_page,
            PACKED_PER_BLOCK,
            PAGE_TOKENS,
            GROUP_TOKENS,
            HEAD_DIM,
            PACKED_TILE,
            FORMAT,
            PARTS,
            FAST,
            False,
            PRECISION,
        )
        low, log = normalise(low, largest, weight)
        high, log = normalise(high, largest, weight)
        if alone:
            store_halves(out + query_head * HEAD_DIM, low, high, real_head, HEAD_DIM)
        else:
            store_halves(parts + part_at * HEAD_DIM, low, high, real_head, HEAD_DIM)
            tl.store(logs + part_at, log, mask=real_head)

    if not alone:
        # All threads' parts before the one count, and the count before what others left is read.
        tl.debug_barrier()
        counter = counters + row * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
            tl.store(counter, 0)
            combine(
                parts,
                logs,
                out,
                first_item,
                count,
                prefix_slots + row * prefix_count,
                prefix_count,
                head,
                KV_HEADS,
                GROUP,
                HEAD_DIM,
                HEADS,
                DIM,
                STEP,
            )


def compile_cases() -> list[CompileCase]:
    """Whole and gathered pages, several heads, float32, packed pages among them."""

    def case(
        dim: int,
        group: int,
        page_tokens: int,
        tile: int,
        num_warps: int,
        num_stages: int,
        dtype: str = "bf16",
        sinks: bool = False,
        packed: FormatName | None = None,
    ) -> CompileCase:
        side = launch.bucket(group)
        constants = {
            "PAGES_PER_BLOCK": 128,
            "PAGE_TOKENS": page_tokens,
            "KV_HEADS": 8,
            "GROUP": group,
            "HEAD_DIM": dim,
            "TILE": tile,
            "FIELDS": ITEM_FIELDS if packed is None else MIXED_ITEM_FIELDS,
            "ROWS": max(side, MIN_SIDE),
            "DIM": padded(dim),
            "HEADS": side,
            "STEP": max(COMBINED_ELEMENTS * num_warps // (side * padded(dim)), 2),
            "PRECISION": "ieee" if dtype == "fp32" else "tf32",
            "SINKS": sinks,
            **packed_constants(packed, page_tokens, dim),
        }
        signature = {**decode_signature(dtype), **packed_signature(packed)}
        architectures = (90, 100) if packed == "fp8" else (80, 90, 100)
        return CompileCase(
            decode_kernel, signature, constants, num_warps, num_stages, architectures
        )

    return [
        case(128, 4, 64, 64, 2, 3),
        case(128, 4, 16, 64, 2, 3),
        case(128, 4, 64, 64, 2, 3, sinks=True),
        case(64, 3, 64, 64, 2, 3, sinks=True),
        case(128, 4, 256, 64, 2, 3),
        case(64, 3, 64, 64, 2, 3),
        case(80, 1, 64, 64, 2, 3),
        case(256, 16, 32, 32, 2, 3),
        case(128, 4, 64, 16, 4, 2, "fp32"),
        case(128, 4, 64, 32, 2, 3, packed="int8"),
        case(128, 4, 64, 32, 2, 3, packed="int4"),
        case(128, 4, 64, 32, 2, 3, packed="fp8"),
        case(128, 4, 64, 32, 2, 3, sinks=True, packed="int4"),
    ]


def decode_signature(dtype: str) -> dict[str, str]:
    """Types of the decode kernel's arguments."""
    return {
        **dict.fromkeys(("q", "sink_q", "kv", "output"), f"*{dtype}:16"),
        **dict.fromkeys(("page_table", "items", "counters"), "*i32:16"),
        **dict.fromkeys(("parts", "logs"), "*fp32:16"),
        "scale": "fp32",
        **dict.fromkeys(("layer", "prefix_slots", "table_stride", "sinks"), "i32"),
        **dict.fromkeys(("q_row_stride", "q_head_stride"), "i32:16"),
        **dict.fromkeys(("sink_row_stride", "sink_head_stride"), "i32:16"),
        **dict.fromkeys(("block_stride", "page_stride", "layer_stride"), "i64:16"),
    }
