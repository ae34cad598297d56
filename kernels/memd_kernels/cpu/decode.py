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
from memd_kernels.cpu.jit import kernel, part, threads
from memd_kernels.cpu.linear import dots
from memd_kernels.cpu.memory import flat_memory, page_offset, place_of
from memd_kernels.formats import PackedPages
from memd_kernels.plan import AttentionPlan, RunPlan
from memd_kernels.reference.attention import check_groups, check_plan
from memd_kernels.reference.pages import check_kv
from memd_kernels.reference.plan import first_seen, gather_plan, read_lens
from memd_kernels.sinks import Sinks

RUN_TOKENS = 256
LOG2_E = 1.4426950408889634


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

    With sinks, packed pages or shares attention is left to plain torch, and the plan is one for it.
    """
    if sinks or packed is not None or shares:
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
        memory=flat_memory(kv),
    )


@part
def _exp2(values: Any, bits: Any, largest: Any) -> Any:
    """values = 2 ** (values - largest), for values up to the largest; returns their sum.

    By a polynomial on [-0.5, 0.5] and the exponent's bits: the compiler has no exp for vectors.

    Args:
        bits: The memory of `values` as int32.
    """
    count = len(values)
    for i in range(count):
        x = max(values[i] - largest, np.float32(-126))
        whole = np.floor(x + np.float32(0.5))
        part = x - whole
        power = np.float32(1.5404e-4)
        power = power * part + np.float32(1.33335581e-3)
        power = power * part + np.float32(9.61812911e-3)
        power = power * part + np.float32(5.55041087e-2)
        power = power * part + np.float32(2.40226507e-1)
        power = power * part + np.float32(6.93147181e-1)
        values[i] = power * part + np.float32(1)
        bits[i] += np.int32(whole) << 23
    total = np.float32(0)
    for i in range(count):
        total += values[i]
    return total


@part
def _add_values(out: Any, weights: Any, values: Any) -> None:
    """out += weights @ values, of one query head and some tokens."""
    size = len(out)
    for first in range(0, len(weights) - 7, 8):
        w0, w1, w2, w3, w4, w5, w6, w7 = weights[first : first + 8]
        v0, v1, v2, v3 = values[first], values[first + 1], values[first + 2], values[first + 3]
        v4, v5, v6, v7 = values[first + 4], values[first + 5], values[first + 6], values[first + 7]
        for i in range(size):
            out[i] += ((w0 * v0[i] + w1 * v1[i]) + (w2 * v2[i] + w3 * v3[i])) + (
                (w4 * v4[i] + w5 * v5[i]) + (w6 * v6[i] + w7 * v7[i])
            )
    for token in range(len(weights) // 8 * 8, len(weights)):
        row = values[token]
        for i in range(size):
            out[i] += weights[token] * row[i]


@part
def _tokens(memory: Any, at: int, low: int, high: int, size: int) -> Any:
    """Tokens [low, high) of the head that begins at a number of the memory, [tokens, size]."""
    return memory[at + low * size : at + high * size].reshape(high - low, size)


@part
def _attend_run(
    q: Any,
    memory: Any,
    place: Any,
    pages: Any,
    head: int,
    heads: int,
    page_tokens: int,
    start: int,
    stop: int,
    scores: Any,
    log: Any,
    out: Any,
) -> None:
    """The part of a run: out = softmax(q K) V, and the log-sum-exp of its scores, by base 2."""
    group, size = q.shape
    for page in range(start // page_tokens, (stop + page_tokens - 1) // page_tokens):
        first = page * page_tokens
        low, high = max(start, first), min(stop, first + page_tokens)
        at = page_offset(place, pages[page]) + head * page_tokens * size
        keys = _tokens(memory, at, low - first, high - first, size)
        for row in range(group):
            dots(q[row], keys, scores[:, low - start : high - start].T, row)
    bits = scores.view(np.int32)
    for row in range(group):
        row_scores = scores[row, : stop - start]
        largest = row_scores.max()
        total = _exp2(row_scores, bits[row, : stop - start], largest)
        log[row] = largest + np.log2(total)
        row_scores /= total
    out[:] = 0
    for page in range(start // page_tokens, (stop + page_tokens - 1) // page_tokens):
        first = page * page_tokens
        low, high = max(start, first), min(stop, first + page_tokens)
        at = page_offset(place, pages[page]) + (heads + head) * page_tokens * size
        values = _tokens(memory, at, low - first, high - first, size)
        for row in range(group):
            _add_values(out[row], scores[row, low - start : high - start], values)


@kernel(
    "void(f4[:,:,:,::1], f4[::1], UniTuple(i8, 5), i4[:,:], i8[:,::1], i8, i8, f4[:,:,::1],"
    " f4[:,:,:,::1])",
    parallel=True,
)
def _attend(
    q: Any,
    memory: Any,
    place: Any,
    page_table: Any,
    runs: Any,
    page_tokens: Any,
    num_parts: Any,
    logs: Any,
    outs: Any,
) -> None:
    heads, group = q.shape[1:3]
    count = len(runs) * heads
    for share in numba.prange(num_parts):
        scores = np.empty((group, RUN_TOKENS), np.float32)
        for item in range(count * share // num_parts, count * (share + 1) // num_parts):
            run, head = item // heads, item % heads
            row, start, stop = runs[run]
            _attend_run(
                q[row, head],
                memory,
                place,
                page_table[row],
                head,
                heads,
                page_tokens,
                start,
                stop,
                scores,
                logs[run, head],
                outs[run, head],
            )


@kernel("b1(i8[:,::1], i4[:,:], i8, i8)")
def _all_exist(runs: Any, page_table: Any, page_tokens: Any, num_pages: Any) -> bool:
    """Whether each page that a run reads is one of the memory."""
    for run in range(len(runs)):
        row, start, stop = runs[run]
        for page in range(start // page_tokens, (stop + page_tokens - 1) // page_tokens):
            if not 0 <= page_table[row, page] < num_pages:
                return False
    return True


@kernel("void(i8[:,::1], f4[:,:,::1], f4[:,:,:,::1], f4[:,:,:,::1])")
def _combine(runs: Any, logs: Any, parts: Any, out: Any) -> None:
    """Put the parts of each row together, in order."""
    first = 0
    while first < len(runs):
        row, end = runs[first, 0], first + 1
        while end < len(runs) and runs[end, 0] == row:
            end += 1
        for head in range(out.shape[1]):
            for query in range(out.shape[2]):
                largest = logs[first:end, head, query].max()
                shares = np.exp2(logs[first:end, head, query] - largest)
                shares /= shares.sum()
                for run in range(first, end):
                    share = shares[run - first]
                    for i in range(out.shape[3]):
                        out[row, head, query, i] += share * parts[run, head, query, i]
        first = end


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
) -> Tensor:
    """`memd_kernels.reference.decode_attention`, in float32."""
    if sinks is not None or packed is not None or shares is not None:
        return reference.decode_attention(
            q, kv, layer, page_table, kv_lens, scale, window, plan, sinks, packed, shares
        )
    check_kv(kv, layer, q)
    if not isinstance(plan, RunPlan):
        plan = _run_plan(kv_lens, kv, window)
    check_plan(plan, q, page_table, kv_lens)
    place, table, page_tokens = place_of(kv, layer), page_table.numpy(), kv.shape[5]
    if not _all_exist(plan.runs, table, page_tokens, place[0]):
        raise ValueError(f"page_table names a page that is not one of the {place[0]} of kv")
    heads, size = kv.shape[4], q.shape[2]
    scaled = q.contiguous() * (scale * LOG2_E)
    grouped = scaled.view(len(q), heads, -1, size)
    group, runs = grouped.shape[2], len(plan.runs)
    parts, logs = torch.empty(runs, heads, group, size), torch.empty(runs, heads, group)
    out = torch.zeros(grouped.shape)
    _attend(
        grouped.numpy(),
        plan.memory,
        place,
        table,
        plan.runs,
        page_tokens,
        threads(),
        logs.numpy(),
        parts.numpy(),
    )
    _combine(plan.runs, logs.numpy(), parts.numpy(), out.numpy())
    return out.view(q.shape)


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
    """`memd_kernels.reference.shared_prefix_attention`, in float32."""
    check_groups(groups)
    return decode_attention(q, kv, layer, page_table, kv_lens, scale, window, plan, sinks, packed)
