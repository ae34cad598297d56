"""The kernel of `prefill_attention` in Triton, for every card.

A program owns a tile of query rows of one KV head: some tokens times the query heads that share the
head, so that keys and values are read once for them all. The grid depends on shapes alone; which
sequence a program works for it finds by itself, so lengths may change under a captured graph.
"""

import triton
import triton.language as tl

from memd_kernels.compile import CompileCase
from memd_kernels.formats import FORMAT_NAMES, FormatName, PackedFormat
from memd_kernels.triton.prefill_tiles import load_tile

MOST_PACKED_KEYS = 32  # of a tile that may be packed


@triton.jit
def _find_sequence(query_starts, num_sequences, tile, TOKENS: tl.constexpr):
    # Sequence s owns tiles from query_starts[s] // TOKENS + s on: enough for it, at most one to
    # spare. What lies past the last sequence is padding and goes by the number num_sequences; tiles
    # before the first sequence's own go by number 0.
    low = tl.zeros((), tl.int32)
    high = low + num_sequences
    while low < high:
        middle = (low + high + 1) // 2
        owned = tl.load(query_starts + middle) // TOKENS + middle <= tile
        low = tl.where(owned, middle, low)
        high = tl.where(owned, high, middle - 1)
    return low


@triton.jit
def _attend(
    acc,
    top,
    total,
    q_tile,
    position,
    scale,
    window,
    sinks,
    first,
    last,
    kv,
    descriptor,
    table,
    kv_len,
    block_stride,
    page_stride,
    head_start,
    value_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    packed_head,
    packed_block,
    packed_page,
    PACKED: tl.constexpr,
):
    # Tiles [first, last) of keys join the running softmax: acc [ROWS, PADDED_DIM], top and total
    # [ROWS]; top is in units of log2, so that exp2 needs no further product.
    for tile in tl.range(first, last, num_stages=STAGES):
        start = tile * KEYS
        k, v = load_tile(
            kv,
            descriptor,
            table,
            start,
            kv_len,
            block_stride,
            page_stride,
            head_start,
            value_stride,
            HEAD_DIM,
            PADDED_DIM,
            PAGE_TOKENS,
            PAGES_PER_BLOCK,
            KEYS,
            MASKED,
            TMA,
            packed_head,
            packed_block,
            packed_page,
            PACKED,
        )
        scores = tl.dot(q_tile, k.T, input_precision="ieee")  # [ROWS, KEYS]
        if MASKED:
            key_at = start + tl.arange(0, KEYS)
            seen = key_at[None, :] <= position[:, None]
            if HAS_WINDOW:
                seen &= key_at[None, :] > position[:, None] - window
                seen &= key_at[None, :] >= sinks
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        # A row that has seen nothing yet has no finite top to subtract.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        weights = tl.exp2(scores * scale - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=("num_tokens", "num_sequences", "table_stride", "window", "sinks"))
def prefill_kernel(
    q,
    sink_q,
    kv,
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
    sink_token_stride,
    sink_head_stride,
    block_stride,
    page_stride,
    layer_start,
    value_stride,
    scale,
    window,
    sinks,
    packed,
    packed_block,
    packed_page,
    packed_layer_start,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PACKED: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    # PACKED: None, or number of the format, pages a block, its group tokens and parts, head bytes.
    # UNIFORM: no tile of keys goes without masks: what a query gets is the same bits in any chunk.
    # Grid: tiles of tokens, query heads / PACK. `scale` includes log2(e).
    TOKENS: tl.constexpr = ROWS // PACK
    tile = tl.program_id(0)
    sequence = _find_sequence(query_starts, num_sequences, tile, TOKENS)
    begin = tl.load(query_starts + sequence)
    end, kv_len = num_tokens, tl.zeros((), tl.int32)
    if sequence < num_sequences:
        end = tl.load(query_starts + sequence + 1)
        kv_len = tl.load(kv_lens + sequence)
    tiles = (end - begin + TOKENS - 1) // TOKENS
    # Last tokens first: they see most, and a long program that starts late ends alone.
    local = tiles - 1 - (tile - begin // TOKENS - sequence)
    if (local < 0) | (local >= tiles):
        return
    rows = tl.arange(0, ROWS)
    row_token = begin + local * TOKENS + rows // PACK
    row_head = tl.program_id(1) * PACK + rows % PACK
    dims = tl.arange(0, PADDED_DIM)
    wanted = ((row_token < end) & (rows < TOKENS * PACK))[:, None] & (dims < HEAD_DIM)[None, :]
    row_start = row_token.to(tl.int64) * q_token_stride + row_head * q_head_stride
    q_tile = tl.load(q + row_start[:, None] + dims[None, :], mask=wanted, other=0.0)
    first_position = kv_len - (end - begin) + local * TOKENS
    position = first_position + rows // PACK

    # Tiles [low, full_low) need the window's mask, [full_low, full_high) none, up to high causal.
    length = tl.minimum(kv_len, first_position + TOKENS)
    low, full_low = 0, 0
    full_high = tl.maximum(first_position + 1, 0) // KEYS
    high = (tl.maximum(length, 0) + KEYS - 1) // KEYS
    if HAS_WINDOW:
        low = tl.maximum(first_position + 1 - window, sinks) // KEYS
        full_low = (tl.maximum(first_position + TOKENS - window, sinks) + KEYS - 1) // KEYS
        full_low = tl.minimum(full_low, high)
        full_high = tl.maximum(full_low, full_high)
    if UNIFORM:
        full_low, full_high = low, low

    head_start = layer_start + tl.program_id(1) * PACK // GROUP * (PAGE_TOKENS * HEAD_DIM)
    if TMA:
        head_start = layer_start + tl.program_id(1) * PACK // GROUP * PAGE_TOKENS
    packed_head = packed
    if PACKED is not None:
        packed_head += packed_layer_start + tl.program_id(1) * PACK // GROUP * PACKED[4]
    table = page_table + sequence.to(tl.int64) * table_stride
    acc = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        row_start = row_token.to(tl.int64) * sink_token_stride + row_head * sink_head_stride
        sink_tile = tl.load(sink_q + row_start[:, None] + dims[None, :], mask=wanted, other=0.0)
        stop = tl.minimum(kv_len, sinks)
        acc, top, total = _attend(
            acc, top, total, sink_tile, tl.minimum(position, stop - 1), scale, window, sinks, 0,
            (stop + KEYS - 1) // KEYS, kv, descriptor, table, stop, block_stride, page_stride,
            head_start, value_stride, HEAD_DIM, PADDED_DIM, PAGE_TOKENS, PAGES_PER_BLOCK, KEYS,
            False, True, TMA, 1,
            packed_head, packed_block, packed_page, PACKED,
        )  # fmt: skip
    if HAS_WINDOW:
        acc, top, total = _attend(
            acc, top, total, q_tile, position, scale, window, sinks, low, full_low, kv, descriptor,
            table, kv_len, block_stride, page_stride, head_start, value_stride, HEAD_DIM,
            PADDED_DIM, PAGE_TOKENS, PAGES_PER_BLOCK, KEYS, HAS_WINDOW, True, TMA, 1,
            packed_head, packed_block, packed_page, PACKED,
        )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q_tile, position, scale, window, sinks, full_low, full_high, kv,
        descriptor, table, kv_len, block_stride, page_stride, head_start, value_stride, HEAD_DIM,
        PADDED_DIM, PAGE_TOKENS, PAGES_PER_BLOCK, KEYS, HAS_WINDOW, False, TMA, STAGES,
        packed_head, packed_block, packed_page, PACKED,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q_tile, position, scale, window, sinks, full_high, high, kv, descriptor,
        table, kv_len, block_stride, page_stride, head_start, value_stride, HEAD_DIM, PADDED_DIM,
        PAGE_TOKENS, PAGES_PER_BLOCK, KEYS, HAS_WINDOW, True, TMA, STAGES if UNIFORM else 1,
        packed_head, packed_block, packed_page, PACKED,
    )  # fmt: skip
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    row_start = (row_token.to(tl.int64) * HEADS + row_head) * HEAD_DIM
    tl.store(out + row_start[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=wanted)


def packed_tuple(format: PackedFormat, per_block: int) -> tuple[object, ...]:
    """The constant PACKED of the kernel, in which Triton 3.6 takes no strings."""
    parts = tuple(format.parts)
    return FORMAT_NAMES.index(format.name), per_block, format.group_tokens, parts, format.head_bytes


def compile_cases() -> list[CompileCase]:
    """By the bulk copy engine, by pointers, and gathered from small pages of an odd head_dim."""

    def case(
        dim: int,
        page_tokens: int,
        rows: int,
        keys: int,
        num_warps: int,
        tma: bool,
        window: bool,
        sinks: bool = False,
        packed: FormatName | None = None,
        uniform: bool = False,
    ) -> CompileCase:
        tiles = f"tensordesc<bf16[{keys}, {dim}]>"
        strides = "q_token_stride q_head_stride sink_token_stride sink_head_stride block_stride "
        strides += "page_stride layer_start value_stride"
        signature = {
            **dict.fromkeys(("q", "sink_q", "kv", "out"), "*bf16:16"),
            "descriptor": tiles if tma else "*bf16:16",
            **dict.fromkeys(("page_table", "query_starts", "kv_lens"), "*i32:16"),
            **dict.fromkeys(("num_tokens", "num_sequences", "table_stride"), "i32"),
            **dict.fromkeys(("window", "sinks"), "i32"),
            **dict.fromkeys(strides.split(), "i32:16"),
            "scale": "fp32",
            "packed": "*bf16:16" if packed is None else "*u8:16",
            **dict.fromkeys(("packed_block", "packed_page", "packed_layer_start"), "i32:16"),
        }
        constants = {
            "HEADS": 32,
            "GROUP": 4,
            "PACK": 4,
            "HEAD_DIM": dim,
            "PADDED_DIM": triton.next_power_of_2(dim),
            "PAGE_TOKENS": page_tokens,
            "PAGES_PER_BLOCK": 4,
            "ROWS": rows,
            "KEYS": keys if packed is None else min(keys, MOST_PACKED_KEYS),
            "HAS_WINDOW": window,
            "TMA": tma,
            "STAGES": 3 if tma else 2,
            "HAS_SINKS": sinks,
            "PACKED": None,
            "UNIFORM": uniform,
        }
        if packed is not None:
            format = PackedFormat(packed, page_tokens, dim)
            constants["PACKED"] = packed_tuple(format, 28)
        architectures = (90, 100) if tma else (80, 90, 100)
        return CompileCase(
            prefill_kernel, signature, constants, num_warps, architectures=architectures
        )

    return [
        case(128, 64, 128, 64, 8, tma=True, window=True),
        case(128, 64, 64, 64, 4, tma=False, window=False),
        case(80, 16, 64, 64, 4, tma=False, window=True),
        case(128, 64, 64, 64, 4, tma=True, window=True, sinks=True),
        case(64, 16, 64, 64, 4, tma=False, window=True, sinks=True),
        case(128, 64, 64, 64, 4, tma=False, window=True, packed="int4"),
        case(128, 64, 64, 64, 4, tma=False, window=True, sinks=True, packed="int8"),
        case(128, 64, 64, 64, 4, tma=False, window=False, uniform=True),
    ]
