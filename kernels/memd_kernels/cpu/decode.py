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
from memd_kernels.cpu.lanes import (
    LANES,
    LOG2_E,
    exp2,
    fma,
    highest,
    larger,
    load,
    splat,
    spread,
    store,
    sums,
    total,
)
from memd_kernels.cpu.memory import flat_memory, numbers_of, page_offset, place_of
from memd_kernels.formats import PackedPages
from memd_kernels.plan import AttentionPlan, RunPlan
from memd_kernels.reference.attention import check_groups, check_plan
from memd_kernels.reference.pages import check_kv
from memd_kernels.reference.plan import first_seen, gather_plan, read_lens
from memd_kernels.sinks import Sinks

RUN_TOKENS = 256


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
        memory=flat_memory(kv),
    )


@part
def _score(q: Any, at: int, memory: Any, keys: Any, size: int, scores: Any, first: int) -> None:
    """scores[first : first + 8] = the query at q[at] by the keys that begin at eight places."""
    k0, k1, k2, k3, k4, k5, k6, k7 = keys
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = splat(np.float32(0))
    for i in range(0, size, LANES):
        query = load(q, at + i)
        s0 = fma(query, load(memory, k0 + i), s0)
        s1 = fma(query, load(memory, k1 + i), s1)
        s2 = fma(query, load(memory, k2 + i), s2)
        s3 = fma(query, load(memory, k3 + i), s3)
        s4 = fma(query, load(memory, k4 + i), s4)
        s5 = fma(query, load(memory, k5 + i), s5)
        s6 = fma(query, load(memory, k6 + i), s6)
        s7 = fma(query, load(memory, k7 + i), s7)
    store(scores, first, sums((s0, s1, s2, s3, s4, s5, s6, s7)))


@part
def _score_page(q: Any, memory: Any, at: int, low: int, high: int, scores: Any, first: int) -> None:
    """Scores of tokens [low, high) of the page whose keys begin at `at`, from column `first` on.

    Up to seven more columns are overwritten.
    """
    group, size, width = q.shape[0], q.shape[1], scores.shape[1]
    queries, numbers = q.reshape(-1), scores.reshape(-1)
    last = at + (high - 1) * size
    for token in range(low, high, LANES):
        k = at + token * size
        keys = (
            k,
            min(k + size, last),
            min(k + 2 * size, last),
            min(k + 3 * size, last),
            min(k + 4 * size, last),
            min(k + 5 * size, last),
            min(k + 6 * size, last),
            min(k + 7 * size, last),
        )
        for row in range(group):
            column = row * width + first + token - low
            _score(queries, row * size, memory, keys, size, numbers, column)


@part
def _add_values(
    out: Any, at: int, scores: Any, first: int, memory: Any, values: int, count: int, size: int
) -> None:
    """out[at : at + 64] += scores[first : first + count] @ values, whose rows are `size` apart."""
    v0, v1, v2, v3 = load(out, at), load(out, at + 8), load(out, at + 16), load(out, at + 24)
    v4, v5 = load(out, at + 32), load(out, at + 40)
    v6, v7 = load(out, at + 48), load(out, at + 56)
    for token in range(count):
        weight, value = spread(scores, first + token), values + token * size
        v0 = fma(weight, load(memory, value), v0)
        v1 = fma(weight, load(memory, value + 8), v1)
        v2 = fma(weight, load(memory, value + 16), v2)
        v3 = fma(weight, load(memory, value + 24), v3)
        v4 = fma(weight, load(memory, value + 32), v4)
        v5 = fma(weight, load(memory, value + 40), v5)
        v6 = fma(weight, load(memory, value + 48), v6)
        v7 = fma(weight, load(memory, value + 56), v7)
    store(out, at, v0)
    store(out, at + 8, v1)
    store(out, at + 16, v2)
    store(out, at + 24, v3)
    store(out, at + 32, v4)
    store(out, at + 40, v5)
    store(out, at + 48, v6)
    store(out, at + 56, v7)


@part
def _add_page(out: Any, memory: Any, at: int, low: int, high: int, scores: Any, first: int) -> None:
    """out += scores[:, first:] @ values of tokens [low, high) of the page that begins at `at`."""
    group, size, width = out.shape[0], out.shape[1], scores.shape[1]
    numbers, weights = out.reshape(-1), scores.reshape(-1)
    values, count = at + low * size, high - low
    for row in range(group):
        place, column = row * size, row * width + first
        for i in range(0, size - 63, 64):
            _add_values(numbers, place + i, weights, column, memory, values + i, count, size)
        for i in range(size // 64 * 64, size, LANES):
            added = load(numbers, place + i)
            for token in range(count):
                value = load(memory, values + token * size + i)
                added = fma(spread(weights, column + token), value, added)
            store(numbers, place + i, added)


@part
def _soften(scores: Any, count: int, logs: Any, row: int) -> None:
    """scores[:count] = softmax, and the log of the sum that they were divided by, by base 2.

    What follows up to the next eighth is overwritten.
    """
    scores[count : count + LANES - 1] = -np.inf
    peak = load(scores, 0)
    for i in range(LANES, count, LANES):
        peak = larger(load(scores, i), peak)
    most = highest(peak)
    less, one, zero = splat(-most), splat(np.float32(1)), splat(np.float32(0))
    powers = zero
    for i in range(0, count, LANES):
        power = exp2(fma(load(scores, i), one, less))
        store(scores, i, power)
        powers = fma(power, one, powers)
    divisor = total(powers)
    logs[row] = most + np.log2(divisor)
    share = splat(np.float32(1) / divisor)
    for i in range(0, count, LANES):
        store(scores, i, fma(load(scores, i), share, zero))


@part
def _attend_run(
    q: Any,
    memory: Any,
    place: Any,
    pages: Any,
    page_tokens: int,
    start: int,
    stop: int,
    scores: Any,
    log: Any,
    out: Any,
) -> None:
    """The part of a run: out = softmax(q K) V, and the log-sum-exp of its scores, by base 2."""
    heads, group, size = q.shape
    head_numbers = page_tokens * size
    first_page, end_page = start // page_tokens, (stop + page_tokens - 1) // page_tokens
    for page in range(first_page, end_page):
        first = page * page_tokens
        low, high = max(start, first), min(stop, first + page_tokens)
        at = page_offset(place, pages[page])
        for head in range(heads):
            keys = at + head * head_numbers
            _score_page(q[head], memory, keys, low - first, high - first, scores[head], low - start)
    for head in range(heads):
        for row in range(group):
            _soften(scores[head, row], stop - start, log[head], row)
    out[:] = 0
    for page in range(first_page, end_page):
        first = page * page_tokens
        low, high = max(start, first), min(stop, first + page_tokens)
        at = page_offset(place, pages[page])
        for head in range(heads):
            values = at + (heads + head) * head_numbers
            _add_page(
                out[head], memory, values, low - first, high - first, scores[head], low - start
            )


@part
def _scale(numbers: Any, factor: Any, out: Any) -> None:
    """out = numbers * factor."""
    by, zero = splat(factor), splat(np.float32(0))
    for i in range(0, len(out), LANES):
        store(out, i, fma(load(numbers, i), by, zero))


_ATTEND = (
    "void({0}[:,:,:,::1], {0}[::1], UniTuple(i8, 5), i4[:,:], i8[:,::1], i8, f4, i8, f4[:,:,::1],"
    " f4[:,:,:,::1])"
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
    outs: Any,
) -> None:
    heads, group = q.shape[1:3]
    count = len(runs)
    for share in numba.prange(num_parts):
        scores = np.empty((heads, group, RUN_TOKENS + LANES), np.float32)
        query = np.empty(q.shape[1:], np.float32)
        for run in range(count * share // num_parts, count * (share + 1) // num_parts):
            row, start, stop = runs[run]
            _scale(q[row].reshape(-1), scale, query.reshape(-1))
            _attend_run(
                query,
                memory,
                place,
                page_table[row],
                page_tokens,
                start,
                stop,
                scores,
                logs[run],
                outs[run],
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


_COMBINE = "void(i8[:,::1], f4[:,:,::1], f4[:,:,:,::1], {}[:,:,:,::1])"


@kernel([_COMBINE.format("f4"), _COMBINE.format("i2")])
def _combine(runs: Any, logs: Any, parts: Any, out: Any) -> None:
    """Put the parts of each row together, in order."""
    first = 0
    while first < len(runs):
        row, end = runs[first, 0], first + 1
        while end < len(runs) and runs[end, 0] == row:
            end += 1
        for head in range(out.shape[1]):
            for query in range(out.shape[2]):
                shares = np.exp2(logs[first:end, head, query] - logs[first:end, head, query].max())
                shares /= shares.sum()
                for i in range(0, out.shape[3], LANES):
                    value = splat(np.float32(0))
                    for run in range(first, end):
                        share = splat(shares[run - first])
                        value = fma(share, load(parts[run, head, query], i), value)
                    store(out[row, head, query], i, value)
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
    """`memd_kernels.reference.decode_attention`, computed in float32."""
    if sinks is not None or packed is not None or shares is not None or q.shape[2] % LANES:
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
    grouped = q.contiguous().view(len(q), heads, -1, size)
    group, runs = grouped.shape[2], len(plan.runs)
    parts, logs = torch.empty(runs, heads, group, size), torch.empty(runs, heads, group)
    out = torch.zeros(grouped.shape, dtype=q.dtype)
    _attend(
        numbers_of(grouped),
        plan.memory,
        place,
        table,
        plan.runs,
        page_tokens,
        scale * LOG2_E,
        threads(),
        logs.numpy(),
        parts.numpy(),
    )
    _combine(plan.runs, logs.numpy(), parts.numpy(), numbers_of(out))
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
    """`memd_kernels.reference.shared_prefix_attention`, computed in float32."""
    check_groups(groups)
    return decode_attention(q, kv, layer, page_table, kv_lens, scale, window, plan, sinks, packed)
