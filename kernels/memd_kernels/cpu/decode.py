"""Attention of one new token per sequence, straight over its pages.

Each sequence is cut at fixed tokens into runs, which threads take one by one; the parts of a
sequence are put together by their log-sum-exp, in order (Dao et al., "Flash-Decoding", 2023). What
a sequence gets depends on nothing else in the batch.
"""

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from memd_kernels import reference
from memd_kernels.cpu.attend import RUN_TOKENS, WIDTH, attend_run
from memd_kernels.cpu.jit import kernel, part, threads
from memd_kernels.cpu.lanes import LANES, LOG2_E, fma, get, load, put, splat, spread, store
from memd_kernels.cpu.memory import empty, numbers_of, place_of, tensor_of
from memd_kernels.formats import PackedPages
from memd_kernels.plan import AttentionPlan, RunPlan
from memd_kernels.reference.attention import check_groups, check_out, check_plan
from memd_kernels.reference.pages import check_kv
from memd_kernels.reference.plan import first_seen, gather_plan, read_lens
from memd_kernels.sinks import Sinks


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
) -> AttentionPlan:
    """`memd_kernels.reference.plan_decode`: the runs that each row is cut into.

    With sinks, packed pages, shares or heads that fill no register attention is plain torch, and
    the plan is one for it.
    """
    if sinks or packed is not None or shares or kv.shape[6] % LANES:
        return gather_plan(kv_lens, kv, window, sinks)
    return _run_plan(kv_lens, kv, window)


def _run_plan(kv_lens: Tensor, kv: Tensor, window: int | None) -> RunPlan:
    lengths = read_lens(kv_lens, window)
    runs = []
    for row, length in enumerate(lengths):
        seen = first_seen(length - 1, window)
        # From a page's start: a window leaves out whole pages, and runs stay the same.
        starts = range(seen // kv.shape[5] * kv.shape[5], length, RUN_TOKENS)
        runs += [(row, max(start, seen), min(start + RUN_TOKENS, length)) for start in starts]
    return RunPlan(
        num_rows=len(lengths),
        max_pages=-(-max(lengths, default=0) // kv.shape[5]),
        runs=np.array(runs, np.int64).reshape(-1, 3),
        memory=numbers_of(kv),
        padded=min(lengths, default=0) == 0,
    )


@part
def _scale(numbers: Any, at: int, factor: Any, out: Any) -> None:
    """out = as many numbers from numbers[at] on, times factor."""
    by, zero = splat(factor), splat(np.float32(0))
    for i in range(0, len(out), LANES):
        store(out, i, fma(load(numbers, at + i), by, zero))


@part
def _all_exist(runs: Any, page_table: Any, page_tokens: Any, num_pages: Any) -> bool:
    """Whether each page that a run reads is one of the memory."""
    for run in range(len(runs)):
        row, start, stop = runs[run]
        for page in range(start // page_tokens, (stop + page_tokens - 1) // page_tokens):
            if not 0 <= page_table[row, page] < num_pages:
                return False
    return True


@part
def _combine(runs: Any, logs: Any, parts: Any, out: Any) -> None:
    """Put the parts of each row together, in order; logs become the parts' shares."""
    heads, size = parts.shape[1] * parts.shape[2], parts.shape[3]
    logs, parts, numbers = logs.reshape(-1), parts.reshape(-1), out.reshape(-1)
    first = 0
    while first < len(runs):
        row, end = runs[first, 0], first + 1
        while end < len(runs) and runs[end, 0] == row:
            end += 1
        for head in range(heads):
            most, divisor = get(logs, first * heads + head), np.float32(0)
            for run in range(first + 1, end):
                most = max(most, get(logs, run * heads + head))
            for run in range(first, end):
                divisor += np.exp2(get(logs, run * heads + head) - most)
            for run in range(first, end):
                share = np.exp2(get(logs, run * heads + head) - most) / divisor
                put(logs, run * heads + head, share)
            for i in range(0, size, LANES):
                value = splat(np.float32(0))
                for run in range(first, end):
                    at = run * heads + head
                    value = fma(spread(logs, at), load(parts, at * size + i), value)
                store(numbers, (row * heads + head) * size + i, value)
        first = end


_ATTEND = (
    "b1({0}[:,:,:,::1], {0}[:,:,:,:,:,:,:], UniTuple(i8, 5), i4[:,:], i8[:,::1], i8, f4, i8,"
    " f4[:,:,::1], f4[:,:,:,::1], {0}[:,:,:,::1])"
)


@kernel([_ATTEND.format("f4"), _ATTEND.format("i2")], parallel=True)
def _attend(
    q: Any,
    memory: Any,
    place: Any,
    page_table: Any,
    runs: Any,
    page_tokens: Any,
    scale: Any,
    num_parts: Any,
    logs: Any,
    parts: Any,
    out: Any,
) -> bool:
    """Returns whether all pages exist; else nothing is done."""
    if not _all_exist(runs, page_table, page_tokens, place[0]):
        return False
    count, (heads, group, size) = len(runs), q.shape[1:]
    row_heads, row_size = heads * group, heads * group * size
    queries, all_logs, all_parts = q.reshape(-1), logs.reshape(-1), parts.reshape(-1)
    for share in numba.prange(num_parts):
        scores = np.empty(row_heads * WIDTH, np.float32)
        query = np.empty(row_size, np.float32)
        for run in range(count * share // num_parts, count * (share + 1) // num_parts):
            row, start, stop = runs[run]
            _scale(queries, row * row_size, scale, query)
            attend_run(
                query, (heads, group, size), memory, place, page_table, page_tokens,
                (row, start, stop), scores, all_logs, run * row_heads, all_parts, run * row_size,
            )  # fmt: skip
    _combine(runs, logs, parts, out)
    return True


def decode_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
    plan: AttentionPlan | None = None,
    sinks: Sinks | None = None,
    packed: PackedPages | None = None,
    shares: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`memd_kernels.reference.decode_attention`, computed in float32."""
    if sinks is not None or packed is not None or shares is not None or q.shape[2] % LANES:
        return reference.decode_attention(
            q, kv, layer, page_table, kv_lens, scale, window, plan, sinks, packed, shares, out
        )
    check_kv(kv, layer, q)
    if not isinstance(plan, RunPlan):
        plan = _run_plan(kv_lens, kv, window)
    check_plan(plan, q, page_table, kv_lens)
    check_out(out, q)
    heads, size = kv.shape[4], q.shape[2]
    grouped = q.contiguous().view(len(q), heads, -1, size)
    group, runs = grouped.shape[2], len(plan.runs)
    output = empty(q.shape, q.dtype) if out is None else numbers_of(out)
    if plan.padded:
        output[:] = 0
    place = place_of(kv, layer)
    done = _attend(
        numbers_of(grouped),
        plan.memory,
        place,
        page_table.numpy(),
        plan.runs,
        kv.shape[5],
        scale * LOG2_E,
        threads(),
        empty((runs, heads, group), torch.float32),
        empty((runs, heads, group, size), torch.float32),
        output.reshape(grouped.shape),
    )
    if not done:
        raise ValueError(f"page_table names a page that is not one of the {place[0]} of kv")
    return tensor_of(output) if out is None else out


def shared_prefix_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    page_table: Tensor,
    kv_lens: Tensor,
    groups: Tensor,
    scale: float,
    window: int | None,
    plan: AttentionPlan | None = None,
    sinks: Sinks | None = None,
    packed: PackedPages | None = None,
) -> Tensor:
    """`memd_kernels.reference.shared_prefix_attention`, computed in float32."""
    check_groups(groups)
    return decode_attention(q, kv, layer, page_table, kv_lens, scale, window, plan, sinks, packed)
