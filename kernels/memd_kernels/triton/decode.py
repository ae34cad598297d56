"""Attention of one new token per sequence over its pages, in Triton, in one launch.

A program attends to one item of the plan (a run of tiles of one sequence) with all query heads of
one KV head. Rows with one item are done then; of the others each item leaves its part in scratch
memory, and whichever program comes last puts the parts of the row together, in their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memd_kernels import launch
from memd_kernels.compile import CompileCase
from memd_kernels.plan import ITEM_FIELDS, DecodePlan
from memd_kernels.reference.pages import check_kv
from memd_kernels.sinks import Sinks, check_sinks
from memd_kernels.triton.attend import (
    LOG2_E,
    MIN_SIDE,
    attend_tiles,
    joined,
    normalise,
    padded,
    precision,
)
from memd_kernels.triton.plan import plan_decode

SINK_WARPS = 4  # at least: with two the second query and its sums do not fit into registers
COMBINED_ELEMENTS = 4096  # of parts that a warp reads at once: half of its registers


@triton.jit
def _combine(
    parts,
    logs,
    out,
    first_item,
    count,
    prefix_slot,
    prefix_count,
    head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    STEP: tl.constexpr,
):
    """Put together the parts of one row and KV head, own and of the shared prefix, in order."""
    query_head = tl.arange(0, HEADS)
    column = tl.arange(0, DIM)
    largest = tl.full((HEADS,), -float("inf"), tl.float32)
    weight = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, DIM), tl.float32)
    for done in range(0, count + prefix_count, STEP):
        index = done + tl.arange(0, STEP)
        slot = tl.where(index < count, first_item + index, prefix_slot + index - count)
        there = (index < count + prefix_count)[:, None] & (query_head < GROUP)[None, :]
        at = (slot.to(tl.int64) * KV_HEADS + head)[:, None] * GROUP + query_head[None, :]
        # Other multiprocessors wrote these while this kernel ran: not through the first cache.
        log = tl.load(logs + at, mask=there, other=-float("inf"), cache_modifier=".cg")
        part = tl.load(  # [STEP, HEADS, DIM]
            parts + at[:, :, None] * HEAD_DIM + column[None, None, :],
            mask=there[:, :, None] & (column < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        larger = tl.maximum(largest, tl.max(log, 0))
        base = tl.where(larger == -float("inf"), 0.0, larger)
        shrink = tl.exp2(largest - base)
        share = tl.exp2(log - base[None, :])
        weight = weight * shrink + tl.sum(share, 0)
        total = total * shrink[:, None] + tl.sum(part * share[:, :, None], 0)
        largest = larger
    mean, _ = normalise(total, largest, weight)
    real = (query_head < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    at = query_head[:, None] * HEAD_DIM + column[None, :]
    tl.store(out + at, mean.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["layer", "prefix_slots", "table_stride", "sinks"])
def _decode(
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
    real = (query_head < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    query_at = row.to(tl.int64) * q_row_stride + (head * GROUP + query_head) * q_head_stride
    query = tl.load(q + query_at[:, None] + column[None, :], mask=real, other=0.0)  # [ROWS, DIM]
    HEAD_NUMEL: tl.constexpr = PAGE_TOKENS * HEAD_DIM
    total, largest, weight = attend_tiles(
        query,
        kv + layer.to(tl.int64) * layer_stride + head * HEAD_NUMEL,
        page_table + row.to(tl.int64) * table_stride,
        tl.load(record + 1),
        tl.load(record + 2),
        tl.load(record + 6),
        tl.load(record + 5),
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
    )
    if SINKS:  # the first item of a row has its sinks too
        stop = tl.minimum(sinks, tl.load(record + 5))
        if item == first_item:
            query_at = row.to(tl.int64) * sink_row_stride
            query_at += (head * GROUP + query_head) * sink_head_stride
            query = tl.load(sink_q + query_at[:, None] + column[None, :], mask=real, other=0.0)
            sink_total, sink_largest, sink_weight = attend_tiles(
                query,
                kv + layer.to(tl.int64) * layer_stride + head * HEAD_NUMEL,
                page_table + row.to(tl.int64) * table_stride,
                0,
                tl.cdiv(stop, TILE),
                0,
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
            )
            total, largest, weight = joined(
                total, largest, weight, sink_total, sink_largest, sink_weight
            )
    mean, log = normalise(total, largest, weight)

    out = output + (row.to(tl.int64) * KV_HEADS + head) * GROUP * HEAD_DIM
    if count + prefix_count == 1:
        out_at = query_head[:, None] * HEAD_DIM + column[None, :]
        tl.store(out + out_at, mean.to(output.dtype.element_ty), mask=real)
    else:
        part_at = (item.to(tl.int64) * KV_HEADS + head) * GROUP + query_head
        tl.store(parts + part_at[:, None] * HEAD_DIM + column[None, :], mean, mask=real)
        tl.store(logs + part_at, log, mask=query_head < GROUP)
        # All threads' parts before the one count, and the count before what others left is read.
        tl.debug_barrier()
        counter = counters + row * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
            tl.store(counter, 0)
            _combine(
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


def decode_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
    plan: DecodePlan | None = None,
    sinks: Sinks | None = None,
) -> Tensor:
    """Attend with the last token of each sequence, whose keys and values are already in the pages.

    As `memd_kernels.reference.decode_attention`, except that contents of tensors are not checked:
    that would wait for the device. Lengths beyond the page table are the caller's bug. Two launches
    with one plan must not run at the same time.

    Raises:
        ValueError: a shape, dtype or layout does not fit, or the plan is for another batch size.

    Notes:
        Deterministic: which program is last does not change the order of sums. A row's result
        depends on where it is cut, and so on the other lengths of the batch, within rounding.

    Source:
        Online softmax (arXiv 1805.02867) split over the keys as in Flash-Decoding; the division
        of work and the kernel are memd's.
    """
    check_decode(q, kv, layer, page_table, kv_lens)
    count = check_sinks(sinks, q, window)
    if plan is None:
        plan = plan_decode(kv_lens, kv, q.shape[1], window, sinks=count)
    parts, logs = scratch(q, len(plan.items))
    return launch_decode(q, kv, layer, page_table, scale, plan, parts, logs, sinks)


def check_decode(q: Tensor, kv: Tensor, layer: int, page_table: Tensor, kv_lens: Tensor) -> None:
    """Refuse arguments of the wrong shape, dtype or layout.

    Raises:
        ValueError: one of them is.
    """
    check_kv(kv, layer, q)
    rows = q.shape[0]
    if kv_lens.shape != (rows,) or kv_lens.dtype != torch.int32:
        raise ValueError(f"kv_lens has {tuple(kv_lens.shape)} {kv_lens.dtype} for {rows} rows of q")
    if page_table.ndim != 2 or page_table.dtype != torch.int32 or len(page_table) != rows:
        raise ValueError(
            f"page_table is {tuple(page_table.shape)} {page_table.dtype}, not int32 of "
            f"[{rows}, max_pages]"
        )
    heads, tokens, dim = kv.shape[4:]
    if kv.stride()[3:] != (heads * tokens * dim, tokens * dim, dim, 1):
        raise ValueError(f"kv has strides {kv.stride()}: a layer of a page is not contiguous")
    if q.stride(2) != 1 or page_table.stride(1) != 1:
        raise ValueError("the last axis of q and of page_table must be contiguous")


def scratch(q: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Room for the parts of `slots` items: means [slots, heads, head_dim], logs [slots, heads]."""
    _, heads, dim = q.shape
    parts = torch.empty((slots, heads, dim), dtype=torch.float32, device=q.device)
    return parts, torch.empty((slots, heads), dtype=torch.float32, device=q.device)


def launch_decode(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    scale: float,
    plan: DecodePlan,
    parts: Tensor,
    logs: Tensor,
    sinks: Sinks | None = None,
) -> Tensor:
    """The kernel over a plan; parts of shared prefixes lie behind those of the items.

    Raises:
        ValueError: the plan is for a batch of another size.
    """
    rows, heads, dim = q.shape
    kv_heads = kv.shape[4]
    if len(plan.counters) != rows * kv_heads:
        raise ValueError(f"the plan is not for {rows} rows of {kv_heads} KV heads")
    output = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    group = launch.bucket(heads // kv_heads)
    padded_dim = padded(dim)
    sink_q = q if sinks is None else sinks.q
    num_warps = max(plan.config.num_warps, 1 if sinks is None else SINK_WARPS)
    _decode[(kv_heads, len(plan.items))](
        q,
        sink_q,
        kv,
        page_table,
        plan.items,
        plan.counters,
        parts,
        logs,
        output,
        layer,
        scale * LOG2_E,
        len(plan.items),
        0 if sinks is None else sinks.count,
        *q.stride()[:2],
        *sink_q.stride()[:2],
        page_table.stride(0),
        *kv.stride()[:3],
        PAGES_PER_BLOCK=kv.shape[1],
        PAGE_TOKENS=kv.shape[5],
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=dim,
        TILE=plan.config.block_n,
        FIELDS=ITEM_FIELDS,
        ROWS=max(group, MIN_SIDE),
        DIM=padded_dim,
        HEADS=group,
        STEP=max(COMBINED_ELEMENTS * num_warps // (group * padded_dim), 2),
        PRECISION=precision(q.dtype),
        SINKS=sinks is not None,
        num_warps=num_warps,
        num_stages=plan.config.num_stages,
    )
    return output


def compile_cases() -> list[CompileCase]:
    """Whole and gathered pages, several heads, float32."""

    def case(
        dim: int,
        group: int,
        page_tokens: int,
        tile: int,
        num_warps: int,
        num_stages: int,
        dtype: str = "bf16",
        sinks: bool = False,
    ) -> CompileCase:
        side = launch.bucket(group)
        constants = {
            "PAGES_PER_BLOCK": 128,
            "PAGE_TOKENS": page_tokens,
            "KV_HEADS": 8,
            "GROUP": group,
            "HEAD_DIM": dim,
            "TILE": tile,
            "FIELDS": ITEM_FIELDS,
            "ROWS": max(side, MIN_SIDE),
            "DIM": padded(dim),
            "HEADS": side,
            "STEP": max(COMBINED_ELEMENTS * num_warps // (side * padded(dim)), 2),
            "PRECISION": "ieee" if dtype == "fp32" else "tf32",
            "SINKS": sinks,
        }
        return CompileCase(_decode, decode_signature(dtype), constants, num_warps, num_stages)

    return [
        case(128, 4, 64, 64, 2, 3),
        case(128, 4, 16, 64, 2, 3),
        case(128, 4, 64, 64, SINK_WARPS, 3, sinks=True),
        case(64, 3, 64, 64, SINK_WARPS, 3, sinks=True),
        case(128, 4, 256, 64, 2, 3),
        case(64, 3, 64, 64, 2, 3),
        case(80, 1, 64, 64, 2, 3),
        case(256, 16, 32, 32, 2, 3),
        case(128, 4, 64, 16, 4, 2, "fp32"),
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
