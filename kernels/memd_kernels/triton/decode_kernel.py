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
from memd_kernels.triton.attend import (
    MIN_SIDE,
    attend_tiles,
    combine,
    combined_at,
    normalise,
    padded,
)
from memd_kernels.triton.attend_packed import (
    MIN_COLUMNS,
    attend_packed,
    load_queries,
    store_columns,
)
from memd_kernels.triton.decode_launch import MOST_PARTS as MOST_PARTS_AT_ONCE
from memd_kernels.triton.decode_launch import combined_step
from memd_kernels.triton.overlap import let_next_in, prefetch_run, take_room, wait_for_previous
from memd_kernels.triton.packed_launch import packed_constants, packed_signature
from memd_kernels.triton.unpack import UNIT_TOKENS

MOST_PARTS = tl.constexpr(MOST_PARTS_AT_ONCE)
PART_GROUP = tl.constexpr(8)


@triton.jit
def _comes_last(counter, count):
    """Whether this program is the last of `count` to come here; the counter begins anew then."""
    # All threads' parts before the one count, and the count before what others left is read.
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _ask_ahead(
    table,
    keys,
    position,
    stop,
    block_stride,
    page_stride,
    value_stride,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RUN: tl.constexpr,
):
    """Bring the RUN tokens around a position into the second cache."""
    entry = tl.load(table + position // PAGE_TOKENS, mask=position < stop, other=0)
    page = entry.to(tl.int64)
    first = keys + page // PAGES_PER_BLOCK * block_stride + page % PAGES_PER_BLOCK * page_stride
    first += position // RUN * RUN % PAGE_TOKENS * HEAD_DIM
    prefetch_run(first, RUN * HEAD_DIM)
    prefetch_run(first + value_stride, RUN * HEAD_DIM)


@triton.jit(
    do_not_specialize=["layer", "num_rows", "prefix_slots", "log_shift", "table_stride", "sinks"]
)
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
    num_rows,
    prefix_slots,
    log_shift,
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
    OVERLAP: tl.constexpr,
    ROOM: tl.constexpr,
):
    never = num_rows < 0  # which the compiler does not know
    if OVERLAP:
        take_room(never, ROOM)
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
    start = tl.load(record + 6)
    stop = tl.load(record + 5)
    row_at, head_stride = q + row.to(tl.int64) * q_row_stride, q_head_stride
    if SINKS:  # an item that begins before the end of the sinks is theirs
        of_sinks = start < sinks
        row_at = tl.where(of_sinks, sink_q + row.to(tl.int64) * sink_row_stride, row_at)
        head_stride = tl.where(of_sinks, sink_head_stride, q_head_stride)
    row_at += head * GROUP * head_stride
    table = page_table + row.to(tl.int64) * table_stride
    out = output + (row.to(tl.int64) * KV_HEADS + head) * GROUP * HEAD_DIM
    alone = count + prefix_count == 1
    MIXED: tl.constexpr = FORMAT != "full"
    slot = item
    is_packed, gap_at, gap = 0, 0, 0
    if MIXED:
        slot = tl.load(record + 11)
        is_packed = tl.load(record + 8)
        gap_at = tl.load(record + 9)
        gap = tl.load(record + 10)
    part_at = (slot.to(tl.int64) * KV_HEADS + head) * GROUP + query_head
    HEAD_NUMEL: tl.constexpr = PAGE_TOKENS * HEAD_DIM
    keys = kv + layer.to(tl.int64) * layer_stride + head * HEAD_NUMEL
    if OVERLAP:
        # The page table is older than the kernel before, and a plan is out when its kernel ends;
        # keys and values may be new, and are only asked for. All else comes behind the wait.
        _ask_ahead(
            table, keys, tl.maximum(tl.load(record + 1) * TILE, start), stop, block_stride,
            page_stride, KV_HEADS * HEAD_NUMEL, PAGES_PER_BLOCK, PAGE_TOKENS, HEAD_DIM,
            min(TILE, PAGE_TOKENS),
        )  # fmt: skip
        wait_for_previous(OVERLAP, False)
    if is_packed == 0:
        query = row_at + query_head[:, None] * head_stride + column[None, :]
        if not OVERLAP:
            query = tl.load(query, mask=real, other=0.0)  # [ROWS, DIM]
        # Few pages are full where others are packed: fewer registers and less shared memory for
        # them let more programs run at once.
        CUT: tl.constexpr = max(TILE // (16 if FORMAT == "int4" else 32), 1) if MIXED else 1
        total, largest, weight = attend_tiles(
            query,
            keys,
            table,
            tl.load(record + 1) * CUT,
            tl.load(record + 2) * CUT,
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
            TILE // CUT,
            False,
            PRECISION,
            gap_at * CUT,
            gap * CUT,
            MIXED,
            2 if MIXED else None,
            OVERLAP,
            real,
            never,
        )
        mean, log = normalise(total, largest, weight)
        if alone:
            out_at = query_head[:, None] * HEAD_DIM + column[None, :]
            tl.store(out + out_at, mean.to(output.dtype.element_ty), mask=real)
        else:
            tl.store(parts + part_at[:, None] * HEAD_DIM + column[None, :], mean, mask=real)
            tl.store(logs + part_at, log, mask=real_head)
    elif MIXED:
        UNIT: tl.constexpr = min(UNIT_TOKENS, PAGE_TOKENS)
        WIDE: tl.constexpr = q.dtype.element_ty == tl.float32
        member = tl.arange(0, max(HEADS, MIN_COLUMNS))
        real_member = member < GROUP
        member_at = row_at + member * head_stride
        queries = load_queries(member_at, real_member, FORMAT, HEAD_DIM, DIM, WIDE)
        packed_mean, packed_log = attend_packed(
            queries,
            packed + layer.to(tl.int64) * packed_layer + head * HEAD_BYTES,
            table,
            tl.load(record + 1) * (TILE // UNIT),
            tl.load(record + 2) * (TILE // UNIT),
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
            DIM,
            UNIT,
            FORMAT,
            PARTS,
            FAST,
            False,
            PRECISION,
        )
        if alone:
            store_columns(out + member * HEAD_DIM, packed_mean, real_member, HEAD_DIM)
        else:
            part = (slot.to(tl.int64) * KV_HEADS + head) * GROUP + member
            store_columns(parts + part * HEAD_DIM, packed_mean, real_member, HEAD_DIM)
            tl.store(logs + part, packed_log, mask=real_member)

    let_next_in(OVERLAP)
    if not alone:
        # A row of many parts is put together in two stages, by programs that come last in a group
        # and by the last of these: one program would have to read all parts one after the other.
        member_of, first_column, within, kept = combined_at(GROUP, HEAD_DIM, HEADS, DIM)
        stride, arriving, goes_on, shift = 1, count, count > 0, 0
        if count > MOST_PARTS:
            stride = PART_GROUP
            shift = log_shift  # where shares are wanted what each part has left stays
            arriving = tl.cdiv(count, PART_GROUP)
            first_slot = slot - (slot - first_item) % PART_GROUP
            size = tl.minimum(PART_GROUP, first_item + count - first_slot)
            counter = counters + (num_rows + first_slot) * KV_HEADS + head
            goes_on = _comes_last(counter, size)
            if goes_on:
                group_mean, group_log = combine(
                    parts, logs, first_slot, 1, size, 0, 0, head,
                    KV_HEADS, GROUP, HEAD_DIM, HEADS, DIM, STEP,
                )  # fmt: skip
                at = (first_slot.to(tl.int64) * KV_HEADS + head) * GROUP
                tl.debug_barrier()  # the slot has been read by all threads
                tl.store(parts + at * HEAD_DIM + within, group_mean, mask=kept)
                once = (first_column == 0) & (member_of < GROUP)
                tl.store(logs + shift + at + member_of, group_log, mask=once)
        if goes_on:
            goes_on = _comes_last(counters + row * KV_HEADS + head, arriving)
            if goes_on:
                row_mean, _ = combine(
                    parts, logs + shift, first_item, stride, arriving,
                    prefix_slots + row * prefix_count, prefix_count, head,
                    KV_HEADS, GROUP, HEAD_DIM, HEADS, DIM, STEP,
                )  # fmt: skip
                tl.store(out + within, row_mean.to(output.dtype.element_ty), mask=kept)


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
        room: int | None = None,
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
            "STEP": combined_step(side * padded(dim), num_warps, packed is not None),
            "PRECISION": "ieee" if dtype == "fp32" else "tf32",
            "SINKS": sinks,
            **packed_constants(packed, page_tokens, dim),
            "ROOM": room or 0,
        }
        if room is None:
            constants["OVERLAP"] = False
        signature = {**decode_signature(dtype), **packed_signature(packed)}
        architectures = (90, 100) if packed == "fp8" else (80, 90, 100)
        return CompileCase(
            decode_kernel, signature, constants, num_warps, num_stages, architectures
        )

    return [
        case(128, 4, 64, 64, 2, 3),
        case(128, 4, 64, 64, 4, 4, room=16 << 10),
        case(128, 4, 16, 64, 2, 3),
        case(64, 3, 64, 64, 2, 3, sinks=True),
        case(64, 3, 64, 64, 2, 3),
        case(80, 1, 64, 64, 2, 3),
        case(256, 16, 32, 32, 2, 3),
        case(128, 4, 64, 16, 4, 2, "fp32"),
        case(128, 4, 64, 64, 2, 2, packed="int8"),
        case(128, 4, 64, 64, 1, 2, packed="int4"),
        case(128, 4, 64, 64, 2, 3, packed="fp8"),
        case(128, 4, 64, 64, 2, 3, sinks=True, packed="int4"),
    ]


def decode_signature(dtype: str) -> dict[str, str]:
    """Types of the decode kernel's arguments."""
    return {
        **dict.fromkeys(("q", "sink_q", "kv", "output"), f"*{dtype}:16"),
        **dict.fromkeys(("page_table", "items", "counters"), "*i32:16"),
        **dict.fromkeys(("parts", "logs"), "*fp32:16"),
        "scale": "fp32",
        **dict.fromkeys(("layer", "num_rows", "prefix_slots", "log_shift"), "i32"),
        **dict.fromkeys(("table_stride", "sinks"), "i32"),
        **dict.fromkeys(("q_row_stride", "q_head_stride"), "i32:16"),
        **dict.fromkeys(("sink_row_stride", "sink_head_stride"), "i32:16"),
        **dict.fromkeys(("block_stride", "page_stride", "layer_stride"), "i64:16"),
    }
