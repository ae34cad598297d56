"""Attention of the query heads of one token over a run of its pages, with one thread.

Keys and values come from memory about as fast as they are computed with, so the next page is asked
for while one is worked on.
"""

from typing import Any

import numpy as np

from memd_kernels.cpu.jit import part
from memd_kernels.cpu.lanes import (
    LANES,
    exp2,
    fma,
    highest,
    larger,
    load,
    prefetch,
    put,
    splat,
    spread,
    store,
    sums,
    total,
)
from memd_kernels.cpu.memory import page_offset

RUN_TOKENS = 256  # of a run, at most
WIDTH = RUN_TOKENS + LANES  # of a row of scores
LINE_BYTES = 64  # of the cache


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
def _score_page(
    q: Any,
    at: int,
    group: int,
    size: int,
    memory: Any,
    keys: int,
    ahead: int,
    count: int,
    scores: Any,
    to: int,
) -> None:
    """Scores of `group` queries from q[at] on with `count` keys, each query's in a row of `scores`.

    Up to seven more columns are overwritten. What is at `ahead` is asked for on the way.
    """
    last, line = keys + (count - 1) * size, LINE_BYTES // memory.itemsize
    for token in range(0, count, LANES):
        k = keys + token * size
        places = (
            k,
            min(k + size, last),
            min(k + 2 * size, last),
            min(k + 3 * size, last),
            min(k + 4 * size, last),
            min(k + 5 * size, last),
            min(k + 6 * size, last),
            min(k + 7 * size, last),
        )
        for i in range(token * size, (token + LANES) * size, line):
            prefetch(memory, ahead + i)
        for row in range(group):
            _score(q, at + row * size, memory, places, size, scores, to + row * WIDTH + token)


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
def _add_page(
    out: Any,
    at: int,
    group: int,
    size: int,
    memory: Any,
    values: int,
    ahead: int,
    count: int,
    scores: Any,
    first: int,
) -> None:
    """Rows of out[at:] += rows of scores[first:] @ `count` values; what is at `ahead` is asked for
    on the way.
    """
    line = LINE_BYTES // memory.itemsize
    for row in range(group):
        for i in range(row * line, count * size, group * line):
            prefetch(memory, ahead + i)
        place, column = at + row * size, first + row * WIDTH
        for i in range(0, size - 63, 64):
            _add_values(out, place + i, scores, column, memory, values + i, count, size)
        for i in range(size // 64 * 64, size, LANES):
            added = load(out, place + i)
            for token in range(count):
                value = load(memory, values + token * size + i)
                added = fma(spread(scores, column + token), value, added)
            store(out, place + i, added)


@part
def _soften(scores: Any, at: int, count: int) -> Any:
    """scores[at : at + count] = softmax; returns the log of what they were divided by, by base 2.

    What follows up to the next eighth is overwritten.
    """
    for i in range(count, (count + LANES - 1) // LANES * LANES):
        put(scores, at + i, np.float32(-np.inf))
    peak = load(scores, at)
    for i in range(LANES, count, LANES):
        peak = larger(load(scores, at + i), peak)
    most = highest(peak)
    less, one, zero = splat(-most), splat(np.float32(1)), splat(np.float32(0))
    powers = zero
    for i in range(0, count, LANES):
        power = exp2(fma(load(scores, at + i), one, less))
        store(scores, at + i, power)
        powers = fma(power, one, powers)
    divisor = total(powers)
    share = splat(np.float32(1) / divisor)
    for i in range(0, count, LANES):
        store(scores, at + i, fma(load(scores, at + i), share, zero))
    return most + np.log2(divisor)


@part
def attend_run(
    q: Any,
    shape: Any,
    memory: Any,
    place: Any,
    page_table: Any,
    page_tokens: int,
    run: Any,
    scores: Any,
    logs: Any,
    log_at: int,
    out: Any,
    out_at: int,
) -> None:
    """The part of a run: out = softmax(q K) V, and the log-sum-exp of its scores, by base 2."""
    (heads, group, size), (row, start, stop) = shape, run
    head_numbers = page_tokens * size
    to_values = heads * head_numbers
    first_page, end_page = start // page_tokens, (stop + page_tokens - 1) // page_tokens
    for page in range(first_page, end_page):
        low, high = max(start, page * page_tokens), min(stop, (page + 1) * page_tokens)
        at, skipped = page_offset(place, page_table[row, page]), (low - page * page_tokens) * size
        ahead = page_offset(place, page_table[row, first_page]) + to_values
        if page + 1 < end_page:
            ahead = page_offset(place, page_table[row, page + 1])
        for head in range(heads):
            query, to = head * group * size, head * group * WIDTH + low - start
            keys, ahead_keys = at + skipped + head * head_numbers, ahead + head * head_numbers
            _score_page(q, query, group, size, memory, keys, ahead_keys, high - low, scores, to)
    for head in range(heads * group):
        put(logs, log_at + head, _soften(scores, head * WIDTH, stop - start))
    for i in range(0, heads * group * size, LANES):
        store(out, out_at + i, splat(np.float32(0)))
    for page in range(first_page, end_page):
        low, high = max(start, page * page_tokens), min(stop, (page + 1) * page_tokens)
        at, skipped = page_offset(place, page_table[row, page]), (low - page * page_tokens) * size
        ahead = page_offset(place, page_table[row, min(page + 1, end_page - 1)])
        for head in range(heads):
            to, first = out_at + head * group * size, head * group * WIDTH + low - start
            further = to_values + head * head_numbers
            values, ahead_values = at + skipped + further, ahead + further
            _add_page(out, to, group, size, memory, values, ahead_values, high - low, scores, first)
