"""What a warpgroup of the Hopper prefill kernel does with the tiles that the producer brings.

It owns 64 query rows, and computes the softmax of one tile of keys while the tensor cores multiply
the weights of the tile before with its values. Tiles go from the last to the first, so the masked
ones come first and the loop over all others has no mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

CONSUMER_ROWS = gl.constexpr(64)  # the height of a warpgroup's instruction
SWIZZLE_DIM = gl.constexpr(64)  # elements of two bytes in a row of the widest swizzle


@gluon.jit
def _softmax(
    scores,
    top,
    total,
    position,
    first,
    scale,
    window,
    KEYS: gl.constexpr,
    LAYOUT: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    MASKED: gl.constexpr,
):
    # One more tile of scores [64, KEYS] for the running softmax. Gives weights and the factor of
    # all that was summed before; `top` is in units of log2.
    if MASKED:
        key_at = first + gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
        seen = key_at[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen = seen & (key_at[None, :] > position[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    shift = new_top
    if MASKED:  # a row that has seen nothing yet has no finite top to subtract
        shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * scale - shift[:, None])
    decay = gl.exp2(top - shift)
    return weights, decay, new_top, total * decay + gl.sum(weights, 1)


@gluon.jit
def _hold(total):
    # Left to itself the assembler waits for the product with the values before it computes the
    # exponentials that should run beside it. An instruction that never runs, but depends on their
    # sum and may not cross the wait, keeps them before it.
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p nanosleep.u32 0; mov.b32 $0, $1; }",
        "=f,f",
        [total],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _consume_tiles(
    acc,
    top,
    total,
    weights,
    q_tile,
    ring,
    position,
    scale,
    window,
    last,
    begin,
    end,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    OVERLAP: gl.constexpr,
    MASKED: gl.constexpr,
):
    # Tiles number begin to end - 1, counted from the last tile down. `weights` are those of the
    # tile before, whose product with the values runs under the softmax of this one.
    keys, values, k_ready, v_ready, k_free, v_free = ring
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    for index in range(begin, end):
        stage, phase = index % STAGES, index // STAGES & 1
        before, phase_before = (index - 1) % STAGES, (index - 1) // STAGES & 1
        mbarrier.wait(k_ready.index(stage), phase)
        empty = gl.zeros((CONSUMER_ROWS, KEYS), gl.float32, S_LAYOUT)
        k = keys.index(stage).permute((1, 0))
        scores_token = warpgroup_mma(q_tile, k, empty, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before), phase_before)
        acc_token = warpgroup_mma(weights, values.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores_token])
        mbarrier.arrive(k_free.index(stage), count=1)
        probabilities, decay, top, total = _softmax(
            scores, top, total, position, (last - index) * KEYS, scale, window, KEYS, S_LAYOUT,
            HAS_WINDOW, MASKED,
        )  # fmt: skip
        if OVERLAP:
            total = _hold(total)
        acc, weights = warpgroup_mma_wait(0, deps=[acc_token, weights])
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
        weights = gl.convert_layout(probabilities.to(weights.dtype), weights.type.layout)
    return acc, top, total, weights


@gluon.jit
def _clean_values(
    halves, clean, first, kv_len, HALF: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr
):
    # The first tile may reach past the sequence, where memory may hold NaN, which no weight of zero
    # undoes. Each warpgroup clears its half of the rows in stage 0, then waits for the other.
    ROWS: gl.constexpr = KEYS // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    inside = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    for column in gl.static_range(HEAD_DIM // SWIZZLE_DIM):
        half = halves.index(column * 2 + HALF)
        tile = half.load(layout)
        half.store(gl.where((first + inside < kv_len)[:, None], tile, 0.0))
    fence_async_shared()
    mbarrier.arrive(clean, count=1)  # after a barrier of the warpgroup, as every arrival
    mbarrier.wait(clean, 0)


@gluon.jit
def _rows_of(begin, local, end, WARPGROUP: gl.constexpr, PACK: gl.constexpr, LAYOUT: gl.constexpr):
    # Token and head of each row of a warpgroup, and which of them are there at all.
    TOKENS: gl.constexpr = 2 * CONSUMER_ROWS // PACK
    rows = WARPGROUP * CONSUMER_ROWS + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, LAYOUT))
    token = begin + local * TOKENS + rows // PACK
    wanted = (token < end) & (rows < TOKENS * PACK)
    return token, gl.program_id(1) * PACK + rows % PACK, wanted[:, None]


@gluon.jit
def consume(
    q_tile,
    q,
    out,
    ring,
    value_halves,
    clean,
    place,
    tiles,
    strides,
    scale,
    window,
    WARPGROUP: gl.constexpr,
    HEADS: gl.constexpr,
    PACK: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    # Attention of one warpgroup's rows. Tiles count from the last down: [0, num_masked) need a mask
    # for the diagonal, up to num_full none, up to count one for the window.
    keys, values, k_ready, v_ready, k_free = ring[:5]
    begin, local, end, first_position, kv_len = place
    last, num_masked, num_full, count = tiles
    q_token_stride, q_head_stride = strides
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    LANES: gl.constexpr = HEAD_DIM // 8
    G_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])

    row_token, row_head, wanted = _rows_of(begin, local, end, WARPGROUP, PACK, G_LAYOUT)
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, G_LAYOUT))
    row_start = row_token.to(gl.int64) * q_token_stride + row_head * q_head_stride
    q_tile.store(gl.load(q + row_start[:, None] + dims[None, :], mask=wanted, other=0.0))
    fence_async_shared()

    s_rows = WARPGROUP * CONSUMER_ROWS + gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, S_LAYOUT))
    position = first_position + s_rows // PACK
    acc = gl.zeros((CONSUMER_ROWS, HEAD_DIM), gl.float32, O_LAYOUT)
    top = gl.full((CONSUMER_ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros((CONSUMER_ROWS,), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    if count > 0:
        mbarrier.wait(k_ready.index(0), 0)
        empty = gl.zeros((CONSUMER_ROWS, KEYS), gl.float32, S_LAYOUT)
        scores = warpgroup_mma(q_tile, keys.index(0).permute((1, 0)), empty, use_acc=False)
        mbarrier.arrive(k_free.index(0), count=1)
        probabilities, _, top, total = _softmax(
            scores, top, total, position, last * KEYS, scale, window, KEYS, S_LAYOUT, HAS_WINDOW,
            True,
        )  # fmt: skip
        weights = gl.convert_layout(probabilities.to(q.dtype.element_ty), P_LAYOUT)
        mbarrier.wait(v_ready.index(0), 0)
        if (last + 1) * KEYS > kv_len:
            _clean_values(value_halves, clean, last * KEYS, kv_len, WARPGROUP, KEYS, HEAD_DIM)
        acc, top, total, weights = _consume_tiles(
            acc, top, total, weights, q_tile, ring, position, scale, window, last, 1, num_masked,
            KEYS, STAGES, HAS_WINDOW, OVERLAP, True,
        )  # fmt: skip
        acc, top, total, weights = _consume_tiles(
            acc, top, total, weights, q_tile, ring, position, scale, window, last, num_masked,
            num_full, KEYS, STAGES, HAS_WINDOW, OVERLAP, False,
        )  # fmt: skip
        if HAS_WINDOW:
            acc, top, total, weights = _consume_tiles(
                acc, top, total, weights, q_tile, ring, position, scale, window, last, num_full,
                count, KEYS, STAGES, HAS_WINDOW, OVERLAP, True,
            )  # fmt: skip
        stage, phase = (count - 1) % STAGES, (count - 1) // STAGES & 1
        mbarrier.wait(v_ready.index(stage), phase)
        acc = warpgroup_mma(weights, values.index(stage), acc)
    divisor = gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, O_LAYOUT))
    # The queries' shared memory turns the result from the accumulator's layout to whole rows.
    q_tile.store((acc / divisor[:, None]).to(q.dtype.element_ty))
    result = q_tile.load(G_LAYOUT)
    # Computed again from a number the compiler cannot know to be the same: kept over the loops, the
    # rows' offsets would not fit into registers.
    begin = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [begin], dtype=gl.int32, is_pure=False, pack=1
    )
    row_token, row_head, wanted = _rows_of(begin, local, end, WARPGROUP, PACK, G_LAYOUT)
    row_start = (row_token.to(gl.int64) * HEADS + row_head) * HEAD_DIM
    gl.store(out + row_start[:, None] + dims[None, :], result, mask=wanted)
