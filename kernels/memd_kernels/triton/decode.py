"""Attention of one new token per sequence over its pages, in Triton, in one launch."""

from typing import Any

import torch
from torch import Tensor

from memd_kernels import launch
from memd_kernels.formats import PackedPages
from memd_kernels.launch import LaunchConfig
from memd_kernels.plan import ITEM_FIELDS, MIXED_ITEM_FIELDS, DecodePlan
from memd_kernels.reference.attention import check_out, check_shares
from memd_kernels.reference.pages import check_kv
from memd_kernels.sinks import Sinks, check_sinks
from memd_kernels.triton.attend import LOG2_E, MIN_SIDE, padded, precision
from memd_kernels.triton.decode_kernel import decode_kernel
from memd_kernels.triton.decode_launch import (
    OVERLAPPED,
    combined_step,
    launch_room,
    mixed_registers,
)
from memd_kernels.triton.overlap import overlapped
from memd_kernels.triton.packed_launch import packed_arguments
from memd_kernels.triton.plan import plan_decode
from memd_kernels.triton.shares import add_shares


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
    packed: PackedPages | None = None,
    shares: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with the last token of each sequence, whose keys and values are already in the pages.

    As `memd_kernels.reference.decode_attention`, except that contents of tensors are not checked:
    that would wait for the device. Lengths beyond the page table are the caller's bug. Two launches
    with one plan must not run at the same time. With a plan that is given, the page table must not
    be what the kernel enqueued directly before writes: it may be read while that one ends.

    Raises:
        ValueError: a shape, dtype or layout does not fit, the device has no instructions for the
            page format, or the plan is for another batch size or made without the packed pages.

    Notes:
        Deterministic: which program is last does not change the order of sums. A row's result
        depends on where it is cut, and so on the other lengths of the batch, within rounding.

    Source:
        Online softmax (arXiv 1805.02867) split over the keys as in Flash-Decoding; the division
        of work and the kernel are memd's.
    """
    check_decode(q, kv, layer, page_table, kv_lens, packed)
    count = check_sinks(sinks, q, window)
    check_shares(shares, page_table)
    check_out(out, q)
    if shares is not None and packed is not None:
        raise ValueError("shares of packed pages are not measured")
    if plan is None:
        with_table = None, count, page_table, packed, shares is not None
        plan = plan_decode(kv_lens, kv, q.shape[1], window, *with_table)
    parts, logs = scratch(q, len(plan.items))
    group_logs = 0
    if shares is not None:  # the logs of the items are still wanted then
        group_logs = logs.numel()
        logs = logs.new_empty((2 * len(logs), logs.shape[1]))
    output = launch_decode(
        q, kv, layer, page_table, scale, plan, parts, logs, sinks, packed, group_logs, out
    )
    if shares is not None:
        add_shares(plan, logs, kv.shape[5], shares)
    return output


def check_decode(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    kv_lens: Tensor,
    packed: PackedPages | None,
) -> None:
    """Refuse arguments of the wrong shape, dtype or layout.

    Raises:
        ValueError: one of them is.
    """
    check_kv(kv, layer, q)
    if packed is not None:
        packed.check(kv)
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
    packed: PackedPages | None = None,
    group_logs: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """The kernel over a plan; parts of shared prefixes lie behind those of the items.

    Logs of parts put together lie `group_logs` elements behind those of the first of them.

    Raises:
        ValueError: the plan is for a batch of another size, or for other formats of pages; the
            device has no instructions for the page format.
    """
    rows, heads, dim = q.shape
    kv_heads = kv.shape[4]
    if len(plan.counters) != (rows + len(plan.items)) * kv_heads:
        raise ValueError(f"the plan is not for {rows} rows of {kv_heads} KV heads")
    fields = plan.items.shape[1]
    if fields != (ITEM_FIELDS if packed is None else MIXED_ITEM_FIELDS):
        raise ValueError(
            "the plan was made {} packed pages".format(
                "without" if fields == ITEM_FIELDS else "for"
            )
        )
    output = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device) if out is None else out
    group = launch.bucket(heads // kv_heads)
    padded_dim = padded(dim)
    sink_q = q if sinks is None else sinks.q
    decode_kernel[(kv_heads, len(plan.items))](
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
        rows,
        len(plan.items),
        group_logs,
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
        FIELDS=fields,
        ROWS=max(group, MIN_SIDE),
        DIM=padded_dim,
        HEADS=group,
        STEP=combined_step(group * padded_dim, plan.config.num_warps, packed is not None),
        PRECISION=precision(q.dtype),
        SINKS=sinks is not None,
        num_warps=plan.config.num_warps,
        num_stages=plan.config.num_stages,
        maxnreg=None if packed is None else mixed_registers(plan.config),
        **packed_arguments(packed, kv),
        **_overlap(plan.config, kv, packed),
    )
    return output


def _overlap(config: LaunchConfig, kv: Tensor, packed: PackedPages | None) -> dict[str, Any]:
    """Arguments that let the kernel come up before the one before it has ended, or do not."""
    room = None
    if config.variant == OVERLAPPED and packed is None:
        room = launch_room(config, 2 * config.block_n * kv.shape[6] * kv.itemsize)
    return (
        {"OVERLAP": False, "ROOM": 0} if room is None else {**overlapped(kv.device), "ROOM": room}
    )
