"""Forward kernel of attention over plain tensors, and what it shares with the backward kernels.

Tensors are contiguous, [B, length, heads, HEAD_DIM]. With TMA, where there is a bulk copy engine,
they come as descriptors of [B, heads, length, HEAD_DIM], whose loads give zeros and whose stores do
nothing outside of them; else as pointers. Weights are powers of two: `scale` includes log2(e), and
the logarithms of their sums are in units of log2.
"""

from typing import Any

import triton
import triton.language as tl

from memd_kernels.compile import CompileCase


@triton.jit
def load_tile(
    tensor,
    batch,
    first,
    head,
    length,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TMA: tl.constexpr,
):
    # Tokens [first, first + TILE) of one of HEADS heads, [TILE, PADDED_DIM]; zeros past its end.
    if TMA:
        tile = tensor.load([batch, head, first, 0]).reshape(TILE, PADDED_DIM)
    else:
        dims = tl.arange(0, PADDED_DIM)
        tokens = first + tl.arange(0, TILE)
        rows = (batch.to(tl.int64) * length + tokens) * HEADS + head
        inside = (tokens < length)[:, None] & (dims < HEAD_DIM)[None, :]
        tile = tl.load(tensor + rows[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(
    tensor,
    tile,
    batch,
    first,
    head,
    length,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TMA: tl.constexpr,
):
    if TMA:
        tile = tile.to(tensor.dtype).reshape(1, 1, TILE, PADDED_DIM)
        tensor.store([batch, head, first, 0], tile)
    else:
        dims = tl.arange(0, PADDED_DIM)
        tokens = first + tl.arange(0, TILE)
        rows = (batch.to(tl.int64) * length + tokens) * HEADS + head
        inside = (tokens < length)[:, None] & (dims < HEAD_DIM)[None, :]
        pointers = tensor + rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(pointers, tile.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def seen_mask(row_at, key_at, length, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    # Both arguments broadcast against each other, so either may be the rows of a tile.
    seen = key_at < length
    if CAUSAL:
        seen &= key_at <= row_at
    if HAS_WINDOW:
        seen &= key_at > row_at - window
    return seen


@triton.jit
def key_tiles(
    first_row,
    length,
    window,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    # Tiles of keys [low, high) that rows [first_row, first_row + ROWS) see any of; those of
    # [full_low, full_high) every row sees whole.
    low, full_low = 0, 0
    full_high = length // KEYS
    high = (length + KEYS - 1) // KEYS
    if CAUSAL:
        full_high = tl.minimum(full_high, (first_row + 1) // KEYS)
        high = tl.minimum(high, (first_row + ROWS + KEYS - 1) // KEYS)
    if HAS_WINDOW:
        low = tl.maximum(first_row + 1 - window, 0) // KEYS
        full_low = (tl.maximum(first_row + ROWS - window, 0) + KEYS - 1) // KEYS
        full_low = tl.minimum(full_low, high)
        full_high = tl.maximum(full_low, full_high)
    return low, full_low, full_high, high


@triton.jit
def _forward_tiles(
    acc,
    top,
    total,
    q_tile,
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
        if MASKED:
            key_at = start + tl.arange(0, KEYS)
            seen = seen_mask(row_at[:, None], key_at[None, :], length, window, CAUSAL, HAS_WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        weights = tl.exp2(scores * scale - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=("length", "window"))
def forward_kernel(
    q,
    k,
    v,
    out,
    log_sums,
    length,
    scale,
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
    # Grid: tiles of rows, B * HEADS. `log_sums` [B, HEADS, length], in units of log2.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # longest first
    KV_HEADS: tl.constexpr = HEADS // GROUP
    batch, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    q_tile = load_tile(q, batch, first_row, head, length, HEADS, HEAD_DIM, ROWS, PADDED_DIM, TMA)
    row_at = first_row + tl.arange(0, ROWS)
    low, full_low, full_high, high = key_tiles(
        first_row, length, window, ROWS, KEYS, CAUSAL, HAS_WINDOW
    )
    acc = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_WINDOW:
        acc, top, total = _forward_tiles(
            acc, top, total, q_tile, k, v, batch, head // GROUP, row_at, scale, window, length,
            low, full_low, KV_HEADS, HEAD_DIM, PADDED_DIM, KEYS, CAUSAL, HAS_WINDOW, True, 1, TMA,
        )  # fmt: skip
    acc, top, total = _forward_tiles(
        acc, top, total, q_tile, k, v, batch, head // GROUP, row_at, scale, window, length,
        full_low, full_high, KV_HEADS, HEAD_DIM, PADDED_DIM, KEYS, CAUSAL, HAS_WINDOW, False,
        STAGES, TMA,
    )  # fmt: skip
    acc, top, total = _forward_tiles(
        acc, top, total, q_tile, k, v, batch, head // GROUP, row_at, scale, window, length,
        full_high, high, KV_HEADS, HEAD_DIM, PADDED_DIM, KEYS, CAUSAL, HAS_WINDOW, True, 1, TMA,
    )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # rows past the last may have seen nothing
    store_tile(
        out,
        acc / total[:, None],
        batch,
        first_row,
        head,
        length,
        HEADS,
        HEAD_DIM,
        ROWS,
        PADDED_DIM,
        TMA,
    )
    log_sums += tl.program_id(1).to(tl.int64) * length
    tl.store(log_sums + row_at, top + tl.log2(total), mask=row_at < length)


def compile_case(
    kernel: Any, dim: int, rows: int, keys: int, num_warps: int, num_stages: int, tma: bool
) -> CompileCase:
    """A causal case of any of the flash kernels, with the arguments that it has."""
    row_tiles = key_tiles = "*bf16:16"
    if tma:
        row_tiles, key_tiles = (f"tensordesc<bf16[1, 1, {n}, {dim}]>" for n in (rows, keys))
    signature = {
        **dict.fromkeys(("q", "out", "d_out", "d_q"), row_tiles),
        **dict.fromkeys(("k", "v", "d_k", "d_v"), key_tiles),
        **dict.fromkeys(("log_sums", "deltas"), "*fp32:16"),
        **dict.fromkeys(("length", "window"), "i32"),
        **dict.fromkeys(("scale", "gradient_scale"), "fp32"),
    }
    constants = {
        "HEADS": 32,
        "GROUP": 4,
        "HEAD_DIM": dim,
        "PADDED_DIM": dim,
        "ROWS": rows,
        "KEYS": keys,
        "CAUSAL": True,
        "HAS_WINDOW": False,
        "STAGES": num_stages,
        "TMA": tma,
    }
    names = kernel.arg_names
    return CompileCase(
        kernel,
        {name: kind for name, kind in signature.items() if name in names},
        {name: value for name, value in constants.items() if name in names},
        num_warps,
        num_stages,
        (90, 100) if tma else (80,),
    )


def compile_cases() -> list[CompileCase]:
    """The forward kernel at two head_dims, with and without a bulk copy engine."""
    return [
        *(compile_case(forward_kernel, dim, 128, 64, 8, 3, True) for dim in (64, 128)),
        compile_case(forward_kernel, 128, 64, 64, 4, 2, False),
    ]
