"""`prefill_attention` for Hopper, in Gluon: what Triton's own pipelining cannot express.

Three roles share a program: a producer warp brings tiles of keys and values into shared memory by
the bulk copy engine, and two warpgroups work on 64 query rows each (`prefill_hopper_consumer`).
Between them lies a ring of STAGES tiles each for keys and values; its `ready` barriers are
signalled by the copy engine, its `free` barriers by both warpgroups.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from memd_kernels.compile import CompileCase
from memd_kernels.triton.prefill_hopper_consumer import CONSUMER_ROWS, SWIZZLE_DIM, consume

# Names that changed between Triton 3.6 and 3.9.
VIEW_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _view(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    if VIEW_IS_PUBLIC:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


@gluon.jit
def _find_sequence(query_starts, num_sequences, tile, TOKENS: gl.constexpr):
    # As in the portable kernel: sequence s owns tiles from query_starts[s] // TOKENS + s on.
    low = gl.to_tensor(0)
    high = low + num_sequences
    while low < high:
        middle = (low + high + 1) // 2
        owned = (gl.load(query_starts + middle) // TOKENS + middle <= tile).to(gl.int32)
        low = owned * middle + (1 - owned) * low
        high = owned * high + (1 - owned) * (middle - 1)
    return low


@gluon.jit
def _produce(
    descriptor,
    table,
    keys,
    values,
    ring,
    last,
    count,
    kv_len,
    block_stride,
    page_stride,
    head_start,
    value_stride,
    HEAD_DIM: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
    PAGES_PER_BLOCK: gl.constexpr,
    PIECE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    # A tile lies in shared memory as columns of SWIZZLE_DIM, each KEYS rows in pieces of PIECE.
    k_ready, v_ready, k_free, v_free = ring[2:]
    PIECES: gl.constexpr = KEYS // PIECE
    COLUMNS: gl.constexpr = HEAD_DIM // SWIZZLE_DIM
    for index in range(count):
        stage = index % STAGES
        free_phase = (index // STAGES & 1) ^ 1
        rows = ()
        for piece in gl.static_range(PIECES):
            # Pieces past the end come from the last page, and are hidden or zeroed later.
            start = gl.minimum((last - index) * KEYS + piece * PIECE, (kv_len - 1) // PIECE * PIECE)
            page = gl.load(table + start // PAGE_TOKENS)
            row = page // PAGES_PER_BLOCK * block_stride + page % PAGES_PER_BLOCK * page_stride
            rows += (row + head_start + start % PAGE_TOKENS,)  # type: ignore[assignment]
        for part in gl.static_range(2):
            buffer = keys if part == 0 else values
            ready = k_ready if part == 0 else v_ready
            free = k_free if part == 0 else v_free
            mbarrier.wait(free.index(stage), free_phase)
            mbarrier.expect(ready.index(stage), KEYS * HEAD_DIM * 2)
            for piece in gl.static_range(PIECES):
                for column in gl.static_range(COLUMNS):
                    async_load(
                        descriptor,
                        [rows[piece] + part * value_stride, column * SWIZZLE_DIM],
                        ready.index(stage),
                        buffer.index((stage * COLUMNS + column) * PIECES + piece),
                    )


@gluon.jit(do_not_specialize=("num_tokens", "num_sequences", "table_stride", "window"))
def prefill_hopper_kernel(
    q,
    descriptor,
    page_table,
    query_starts,
    kv_lens,
    out,
    num_tokens,
    num_sequences,
    table_stride,
    q_token_stride,
    q_head_stride,
    block_stride,
    page_stride,
    layer_start,
    value_stride,
    scale,
    window,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
    PAGES_PER_BLOCK: gl.constexpr,
    PIECE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    # Grid: tiles of tokens, query heads / PACK. Strides of pages count rows of HEAD_DIM elements.
    TOKENS: gl.constexpr = 2 * CONSUMER_ROWS // PACK
    COLUMNS: gl.constexpr = HEAD_DIM // SWIZZLE_DIM
    tile = gl.program_id(0)
    sequence = _find_sequence(query_starts, num_sequences, tile, TOKENS)
    begin = gl.load(query_starts + sequence)
    known = sequence < num_sequences
    end = gl.load(query_starts + sequence + 1, mask=known, other=num_tokens)
    kv_len = gl.load(kv_lens + sequence, mask=known, other=0)
    own = (end - begin + TOKENS - 1) // TOKENS
    local = own - 1 - (tile - begin // TOKENS - sequence)
    if (local < 0) | (local >= own):  # a tile to spare, or before the first sequence's
        return
    first_position = kv_len - (end - begin) + local * TOKENS

    # Tiles [low, full_low) need the window's mask, [full_low, full_high) none, up to high causal.
    length = gl.minimum(kv_len, first_position + TOKENS)
    low, full_low = 0, 0
    full_high = gl.maximum(first_position + 1, 0) // KEYS
    high = (gl.maximum(length, 0) + KEYS - 1) // KEYS
    if HAS_WINDOW:
        low = gl.maximum(first_position + 1 - window, 0) // KEYS
        full_low = (gl.maximum(first_position + TOKENS - window, 0) + KEYS - 1) // KEYS
        full_low = gl.minimum(full_low, high)
        full_high = gl.maximum(full_low, full_high)
    count = high - low
    # The tile done first counts as masked even if all of it is seen.
    num_masked = gl.maximum(high - full_high, 1)
    num_full = gl.maximum(high - full_low, 1)

    dtype: gl.constexpr = q.dtype.element_ty
    piece_layout: gl.constexpr = descriptor.layout
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [2, CONSUMER_ROWS, HEAD_DIM], tile_layout)
    shape: gl.constexpr = [STAGES * COLUMNS * (KEYS // PIECE), PIECE, SWIZZLE_DIM]
    k_pieces = gl.allocate_shared_memory(dtype, shape, piece_layout)
    v_pieces = gl.allocate_shared_memory(dtype, shape, piece_layout)
    keys = _view(k_pieces, dtype, [STAGES, KEYS, HEAD_DIM], tile_layout)
    values = _view(v_pieces, dtype, [STAGES, KEYS, HEAD_DIM], tile_layout)
    shape_of_halves: gl.constexpr = [STAGES * COLUMNS * 2, KEYS // 2, SWIZZLE_DIM]
    halves = _view(v_pieces, dtype, shape_of_halves, tile_layout)
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    clean = gl.allocate_shared_memory(gl.int64, [1], bar_layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    mbarrier.init(clean, count=2)
    fence_async_shared()

    head_start = layer_start + gl.program_id(1) * PACK // GROUP * PAGE_TOKENS
    table = page_table + sequence.to(gl.int64) * table_stride
    ring = (keys, values, k_ready, v_ready, k_free, v_free)
    place = (begin, local, end, first_position, kv_len)
    tiles = (high - 1, num_masked, num_full, count)
    strides = (q_token_stride, q_head_stride)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (consume, (
                q_tiles.index(0), q, out, ring, halves, clean, place, tiles, strides, scale, window,
                FIRST, HEADS, PACK, HEAD_DIM, KEYS, STAGES, HAS_WINDOW, OVERLAP,
            )),
            (consume, (
                q_tiles.index(1), q, out, ring, halves, clean, place, tiles, strides, scale, window,
                SECOND, HEADS, PACK, HEAD_DIM, KEYS, STAGES, HAS_WINDOW, OVERLAP,
            )),
            (_produce, (
                descriptor, table, k_pieces, v_pieces, ring, high - 1, count, kv_len, block_stride,
                page_stride, head_start, value_stride, HEAD_DIM, PAGE_TOKENS, PAGES_PER_BLOCK,
                PIECE, KEYS, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Both head_dims; small pages in several pieces; with and without a window."""

    def case(dim: int, page_tokens: int, num_stages: int, window: bool) -> CompileCase:
        piece = min(page_tokens, 64)
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        signature = {
            **dict.fromkeys(("q", "out"), "*bf16:16"),
            "descriptor": f"tensordesc<bf16[{piece}, 64],{layout!r}>",
            **dict.fromkeys(("page_table", "query_starts", "kv_lens"), "*i32:16"),
            **dict.fromkeys(("num_tokens", "num_sequences", "table_stride", "window"), "i32"),
            **dict.fromkeys(("q_token_stride", "q_head_stride"), "i32:16"),
            **dict.fromkeys(("block_stride", "page_stride", "layer_start", "value_stride"), "i32"),
            "scale": "fp32",
        }
        constants = {
            "HEADS": 32,
            "GROUP": 4,
            "PACK": 4,
            "HEAD_DIM": dim,
            "PAGE_TOKENS": page_tokens,
            "PAGES_PER_BLOCK": 4,
            "PIECE": piece,
            "KEYS": 128,
            "STAGES": num_stages,
            "HAS_WINDOW": window,
            "OVERLAP": True,
        }
        return CompileCase(prefill_hopper_kernel, signature, constants, architectures=(90,))

    return [case(128, 16, 2, True), case(64, 64, 4, False)]
