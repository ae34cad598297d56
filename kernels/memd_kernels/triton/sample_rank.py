"""The kernels of `sample` for rows whose tokens are ranked: gathering windows, and the draw.

A program of the first has a chunk of a row; of the second, a row. What is gathered lies in no order
and may lie in another at the next run; nothing depends on it.
"""

import triton
import triton.language as tl

from memd_kernels.triton.sample_draw import (
    NO_TOKEN,
    draw_by_rank,
    load_logits,
    row_limits,
    row_top,
    token_keys,
    token_weights,
)
from memd_kernels.triton.sample_plan import moved

WINDOWS = tl.constexpr(3)  # of top-k, of top-p, of the draw
SUMS = tl.constexpr(8)  # tokens found; then below each window's low and high: tokens, or mass;
K_MASS = tl.constexpr(7)  # mass below the low of top-k's


@triton.jit
def store_windows(windows_ptr, sums_ptr, row, windows):
    """Windows of a row that are to be gathered, with no sums yet."""
    for index in tl.static_range(2 * WINDOWS):
        tl.store(windows_ptr + row * 2 * WINDOWS + index, windows[index])
    for index in tl.static_range(SUMS):
        tl.store(sums_ptr + row * SUMS + index, 0)


@triton.jit
def gather_kernel(
    logits_ptr, most_ptr, first_ptr, windows_ptr, sums_ptr, waiting_ptr, keys_ptr, ids_ptr,
    temperature_ptr,
    stride, vocab, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LIMIT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """A program has one chunk, or, SHARED, a share of the row's: slower, but sooner skipped."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(waiting_ptr + row):
        top, _, _ = row_top(most_ptr, first_ptr, row, chunks, CHUNKS)
        scale = top, tl.load(temperature_ptr + row)
        state = windows_ptr + row * 2 * WINDOWS, sums_ptr + row * SUMS
        buffers = keys_ptr + row * LIMIT, ids_ptr + row * LIMIT
        logits_ptr += row * stride
        most_ptr += row * chunks
        if SHARED:
            for chunk in range(tl.program_id(1), chunks, tl.num_programs(1)):
                _gather(logits_ptr, most_ptr, state, buffers, scale, vocab, chunk, CHUNK, LIMIT)
        else:
            chunk = tl.program_id(1)
            _gather(logits_ptr, most_ptr, state, buffers, scale, vocab, chunk, CHUNK, LIMIT)


@triton.jit
def _gather(
    logits_ptr, most_ptr, state, buffers, scale, vocab, chunk,
    CHUNK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Gather what a chunk has in the windows, and add up what it has below them."""
    windows_ptr, sums_ptr = state
    keys_ptr, ids_ptr = buffers
    top, temperature = scale
    farthest = tl.load(windows_ptr + 1)
    for index in tl.static_range(1, WINDOWS):
        farthest = tl.maximum(farthest, tl.load(windows_ptr + 2 * index + 1))
    nearest = token_keys(tl.load(most_ptr + chunk), top, temperature)
    if nearest < farthest:
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = load_logits(logits_ptr + column, column < vocab)
        keys = tl.where(column < vocab, token_keys(logits, top, temperature), NO_TOKEN)
        taken = _measure(windows_ptr, sums_ptr, keys, nearest)
        found = tl.sum(taken.to(tl.int32), 0)
        if found > 0:
            start = tl.atomic_add(sums_ptr, found.to(tl.int64), sem="relaxed")
            slot = start.to(tl.int32) + tl.cumsum(taken.to(tl.int32), 0) - 1
            taken &= slot < LIMIT
            tl.store(keys_ptr + slot, keys, taken)
            tl.store(ids_ptr + slot, column, taken)


@triton.jit
def _measure(windows_ptr, sums_ptr, keys, nearest):
    """Add what a chunk has below the windows; returns which of its tokens are in one."""
    weights = token_weights(keys)
    taken = tl.zeros(keys.shape, tl.int1)
    for index in tl.static_range(WINDOWS):
        low, high = tl.load(windows_ptr + 2 * index), tl.load(windows_ptr + 2 * index + 1)
        if nearest < high:
            values = tl.full(keys.shape, 1, tl.int32) if index == 0 else weights
            _add_below(sums_ptr + 1 + 2 * index, keys, values, low)
            _add_below(sums_ptr + 2 + 2 * index, keys, values, high)
            if index == 0:
                _add_below(sums_ptr + K_MASS, keys, weights, low)
        taken |= (keys >= low) & (keys < high)
    return taken


@triton.jit
def _add_below(sum_ptr, keys, values, limit):
    """Add the values of the keys below a limit to a sum of the row's."""
    if limit > 0:
        found = tl.sum(tl.where(keys < limit, values, 0), 0)
        if found > 0:
            tl.atomic_add(sum_ptr, found.to(tl.int64), sem="relaxed")


@triton.jit
def draw_kernel(
    logits_ptr, most_ptr, first_ptr, mass_ptr, likely_ptr, windows_ptr, sums_ptr, waiting_ptr,
    keys_ptr, ids_ptr,
    seeds_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    tokens_ptr,
    stride, vocab, chunks,
    CHUNKS: tl.constexpr, LIMIT: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(waiting_ptr + row):
        top, _, _ = row_top(most_ptr, first_ptr, row, chunks, CHUNKS)
        chunk = tl.arange(0, CHUNKS)
        total = tl.sum(tl.load(mass_ptr + row * chunks + chunk, chunk < chunks, 0), 0)
        top_k, top_p, _ = row_limits(top_k_ptr, top_p_ptr, row, vocab)
        min_p = tl.load(min_p_ptr + row)
        measured = chunk < tl.where(min_p > 0, chunks, 0)
        likely = tl.sum(tl.load(likely_ptr + row * chunks + chunk, measured, 0), 0)
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        temperature = tl.load(temperature_ptr + row)
        sums = sums_ptr + row * SUMS
        found = tl.load(sums).to(tl.int32)
        gathered = tl.where(found <= LIMIT, found, 0)
        k_window = _window(windows_ptr, sums, row, 0)
        p_window = _window(windows_ptr, sums, row, 1)
        window = _window(windows_ptr, sums, row, 2)
        top_k = tl.where(k_window[0] < 0, 0, top_k)
        limits = top_k, top_p, min_p
        windows = k_window, p_window, window, tl.load(sums + K_MASS)
        source = keys_ptr + row * LIMIT, ids_ptr + row * LIMIT, gathered, top, temperature
        token, wanted, target, sound = draw_by_rank(
            seed, position, total, likely, limits, windows, source, False
        )
        sound &= found <= LIMIT
        if LAST:
            if sound == 0:
                whole = logits_ptr + row * stride, ids_ptr, vocab, top, temperature
                token, _, _, _ = draw_by_rank(
                    seed, position, total, likely, limits, windows, whole, True
                )
            tl.store(tokens_ptr + row, token.to(tl.int64))
        elif sound:
            tl.store(tokens_ptr + row, token.to(tl.int64))
            tl.store(waiting_ptr + row, 0)
        else:
            k_low, k_high, p_low, p_high = k_window[0], k_window[1], p_window[0], p_window[1]
            if top_k > 0:
                k_low, k_high = moved(top_k, k_window, found > LIMIT)
            if top_p < 1:
                p_low, p_high = moved(wanted, p_window, found > LIMIT)
            low, high = moved(target, window, found > LIMIT)
            planned = k_low, k_high, p_low, p_high, low, high
            tl.debug_barrier()  # all have read what is overwritten
            store_windows(windows_ptr, sums_ptr, row, planned)


@triton.jit
def _window(windows_ptr, sums_ptr, row, index: tl.constexpr):
    """Low and high of a window, and the sums below them."""
    windows_ptr += row * 2 * WINDOWS + 2 * index
    sums_ptr += 1 + 2 * index
    low, high = tl.load(windows_ptr), tl.load(windows_ptr + 1)
    return low, high, tl.load(sums_ptr), tl.load(sums_ptr + 1)
