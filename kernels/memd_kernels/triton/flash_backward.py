"""Gradients of attention over plain tensors: one kernel for queries, one for keys and values.

Both rebuild each tile of weights from the logarithm of its sum that the forward kernel left. The
kernel for keys and values adds up over the query heads that share them in a fixed order.
"""

import triton
import triton.language as tl

from memd_kernels.compile import CompileCase
from memd_kernels.triton.flash_forward import (
    compile_case,
    key_tiles,
    load_tile,
    seen_mask,
    store_tile,
)


@triton.jit(do_not_specialize=("length",))
def delta_kernel(
    out,
    d_out,
    deltas,
    length,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TMA: tl.constexpr,
):
    # Grid: tiles of rows, B * HEADS. What the softmax takes off the gradient of every weight of a
    # row: deltas [B, HEADS, length].
    first_row = tl.program_id(0) * ROWS
    batch, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    tile = load_tile(out, batch, first_row, head, length, HEADS, HEAD_DIM, ROWS, PADDED_DIM, TMA)
    d_tile = load_tile(
        d_out, batch, first_row, head, length, HEADS, HEAD_DIM, ROWS, PADDED_DIM, TMA
    )
    row_at = first_row + tl.arange(0, ROWS)
    sums = tl.sum(tile.to(tl.float32) * d_tile.to(tl.float32), 1)
    tl.store(deltas + tl.program_id(1).to(tl.int64) * length + row_at, sums, mask=row_at < length)


@triton.jit
def _query_tiles(
    acc,
    q_tile,
    d_tile,
    log_sum,
    delta,
    k,
    v,
    batch,
    kv_head,
    row_at,
    scale,
    window,
    length,
    first,
    last,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    for tile in tl.range(first, last, num_stages=STAGES):
        start = tile * KEYS
        k_tile = load_tile(
            k, batch, start, kv_head, length, KV_HEADS, HEAD_DIM, KEYS, PADDED_DIM, TMA
        )
        v_tile = load_tile(
            v, batch, start, kv_head, length, KV_HEADS, HEAD_DIM, KEYS, PADDED_DIM, TMA
        )
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [ROWS, KEYS]
        weights = tl.exp2(scores * scale - log_sum[:, None])
        if MASKED:
            key_at = start + tl.arange(0, KEYS)
            seen = seen_mask(row_at[:, None], key_at[None, :], length, window, CAUSAL, HAS_WINDOW)
            weights = tl.where(seen, weights, 0.0)
        d_weights = tl.dot(d_tile, v_tile.T, input_precision="ieee")
        d_scores = weights * (d_weights - delta[:, None])
        acc = tl.dot(d_scores.to(k_tile.dtype), k_tile, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=("length", "window"))
def query_gradient_kernel(
    q,
    k,
    v,
    d_out,
    log_sums,
    deltas,
    d_q,
    length,
    scale,
    gradient_scale,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    # Grid: tiles of rows, B * HEADS.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # longest first
    KV_HEADS: tl.constexpr = HEADS // GROUP
    batch, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    q_tile = load_tile(q, batch, first_row, head, length, HEADS, HEAD_DIM, ROWS, PADDED_DIM, TMA)
    d_tile = load_tile(
        d_out, batch, first_row, head, length, HEADS, HEAD_DIM, ROWS, PADDED_DIM, TMA
    )
    row_at = first_row + tl.arange(0, ROWS)
    row = tl.program_id(1).to(tl.int64) * length + row_at
    log_sum = tl.load(log_sums + row, mask=row_at < length, other=0.0)
    delta = tl.load(deltas + row, mask=row_at < length, other=0.0)
    low, full_low, full_high, high = key_tiles(
        first_row, length, window, ROWS, KEYS, CAUSAL, HAS_WINDOW
    )
    acc = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    if HAS_WINDOW:
        acc = _query_tiles(
            acc, q_tile, d_tile, log_sum, delta, k, v, batch, head // GROUP, row_at, scale, window,
            length, low, full_low, KV_HEADS, HEAD_DIM, PADDED_DIM, KEYS, CAUSAL, HAS_WINDOW, True,
            1, TMA,
        )  # fmt: skip
    acc = _query_tiles(
        acc, q_tile, d_tile, log_sum, delta, k, v, batch, head // GROUP, row_at, scale, window,
        length, full_low, full_high, KV_HEADS, HEAD_DIM, PADDED_DIM, KEYS, CAUSAL, HAS_WINDOW,
        False, STAGES, TMA,
    )  # fmt: skip
    acc = _query_tiles(
        acc, q_tile, d_tile, log_sum, delta, k, v, batch, head // GROUP, row_at, scale, window,
        length, full_high, high, KV_HEADS, HEAD_DIM, PADDED_DIM, KEYS, CAUSAL, HAS_WINDOW, True, 1,
        TMA,
    )  # fmt: skip
    acc *= gradient_scale
    store_tile(d_q, acc, batch, first_row, head, length, HEADS, HEAD_DIM, ROWS, PADDED_DIM, TMA)


@triton.jit
def _row_tiles(
    first_key,
    length,
    window,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    # Tiles of rows [low, high) that see any of keys [first_key, first_key + KEYS).
    low, high = 0, (length + ROWS - 1) // ROWS
    if CAUSAL:
        low = first_key // ROWS
    if HAS_WINDOW:
        high = tl.minimum(high, (first_key + KEYS + window - 2) // ROWS + 1)
    return low, high


@triton.jit
def _key_value_tiles(
    d_k,
    d_v,
    k_tile,
    v_tile,
    q,
    d_out,
    log_sums,
    deltas,
    batch,
    head,
    key_at,
    scale,
    window,
    length,
    first,
    last,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    for tile in tl.range(first, last, num_stages=STAGES):
        start = tile * ROWS
        row_at = start + tl.arange(0, ROWS)
        q_tile = load_tile(q, batch, start, head, length, HEADS, HEAD_DIM, ROWS, PADDED_DIM, TMA)
        d_tile = load_tile(
            d_out, batch, start, head, length, HEADS, HEAD_DIM, ROWS, PADDED_DIM, TMA
        )
        # Rows past the last get weights of zero. A loop without mask beside one with it, as the
        # other kernels have, does not fit into registers.
        log_sum = tl.load(log_sums + row_at, mask=row_at < length, other=float("inf"))
        delta = tl.load(deltas + row_at, mask=row_at < length, other=0.0)
        scores = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # [KEYS, ROWS]
        weights = tl.exp2(scores * scale - log_sum[None, :])
        if CAUSAL:
            seen = seen_mask(row_at[None, :], key_at[:, None], length, window, CAUSAL, HAS_WINDOW)
            weights = tl.where(seen, weights, 0.0)
        d_v = tl.dot(weights.to(d_tile.dtype), d_tile, d_v, input_precision="ieee")
        d_weights = tl.dot(v_tile, d_tile.T, input_precision="ieee")
        d_scores = weights * (d_weights - delta[None, :])
        d_k = tl.dot(d_scores.to(q_tile.dtype), q_tile, d_k, input_precision="ieee")
    return d_k, d_v


@triton.jit(do_not_specialize=("length", "window"))
def key_value_gradient_kernel(
    q,
    k,
    v,
    d_out,
    log_sums,
    deltas,
    d_k,
    d_v,
    length,
    scale,
    gradient_scale,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    # Grid: tiles of keys, B * HEADS / GROUP. The first keys are seen by most rows: longest first.
    first_key = tl.program_id(0) * KEYS
    KV_HEADS: tl.constexpr = HEADS // GROUP
    batch, kv_head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    k_tile = load_tile(
        k, batch, first_key, kv_head, length, KV_HEADS, HEAD_DIM, KEYS, PADDED_DIM, TMA
    )
    v_tile = load_tile(
        v, batch, first_key, kv_head, length, KV_HEADS, HEAD_DIM, KEYS, PADDED_DIM, TMA
    )
    key_at = first_key + tl.arange(0, KEYS)
    low, high = _row_tiles(first_key, length, window, ROWS, KEYS, CAUSAL, HAS_WINDOW)
    acc_k = tl.zeros((KEYS, PADDED_DIM), tl.float32)
    acc_v = tl.zeros((KEYS, PADDED_DIM), tl.float32)
    for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
        row_start = (batch * HEADS + head).to(tl.int64) * length
        acc_k, acc_v = _key_value_tiles(
            acc_k, acc_v, k_tile, v_tile, q, d_out, log_sums + row_start, deltas + row_start, batch,
            head, key_at, scale, window, length, low, high, HEADS, HEAD_DIM, PADDED_DIM, ROWS,
            CAUSAL, HAS_WINDOW, STAGES, TMA,
        )  # fmt: skip
    acc_k *= gradient_scale
    store_tile(
        d_k, acc_k, batch, first_key, kv_head, length, KV_HEADS, HEAD_DIM, KEYS, PADDED_DIM, TMA
    )
    store_tile(
        d_v, acc_v, batch, first_key, kv_head, length, KV_HEADS, HEAD_DIM, KEYS, PADDED_DIM, TMA
    )


def compile_cases() -> list[CompileCase]:
    """The three kernels, at two head_dims, with and without a bulk copy engine."""
    return [
        compile_case(delta_kernel, 128, 32, 32, 4, 1, True),
        *(compile_case(query_gradient_kernel, dim, 128, 64, 8, 2, True) for dim in (64, 128)),
        compile_case(key_value_gradient_kernel, 64, 64, 128, 8, 2, True),
        compile_case(key_value_gradient_kernel, 128, 64, 64, 8, 2, True),
        compile_case(query_gradient_kernel, 128, 64, 32, 4, 2, False),
        compile_case(key_value_gradient_kernel, 128, 64, 64, 8, 2, False),
    ]
