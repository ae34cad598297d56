"""Attention of a few query rows over the packed pages of a table.

A loop goes over tiles of one format only and passes over pages of the other, so that each keeps its
own loads in flight: a branch inside the loop would wait for every page.
"""

import triton
import triton.language as tl

from memd_kernels.triton.unpack import PACKED_PAGE, load_halves, scale_of


@triton.jit
def _entry(table, tile, end_tile, TILE: tl.constexpr, PAGE_TOKENS: tl.constexpr):
    """The page table's entry of a tile; 0, which is no packed page, past the end."""
    return tl.load(table + tile * TILE // PAGE_TOKENS, mask=tile < end_tile, other=0)


@triton.jit
def _page_of(packed, entry, block_stride, page_stride, PAGES_PER_BLOCK: tl.constexpr):
    page = (entry & (PACKED_PAGE - 1)).to(tl.int64)
    return packed + page // PAGES_PER_BLOCK * block_stride + page % PAGES_PER_BLOCK * page_stride


@triton.jit
def _load_scales(
    head,
    entry,
    within,
    PARTS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
):
    """Scales and offsets of a tile: of keys in both halves of the channels, and of values.

    Of a tile that is not packed they are zeros, which make zeros of everything.
    """
    token = within + tl.arange(0, TILE)
    there = entry >= PACKED_PAGE
    known = token < tl.where(there, within + TILE, 0)
    if FORMAT == "fp8":
        key_scales = (head + PARTS[2]).to(tl.pointer_type(tl.float16))
        value_scales = (head + PARTS[5]).to(tl.pointer_type(tl.float16))
        scale = tl.load(key_scales + token, mask=known, other=0.0)
        value_scale = tl.load(value_scales + token, mask=known, other=0.0)
        return scale, scale, scale, scale, value_scale, value_scale
    else:
        column = tl.arange(0, HALF)
        wanted = column < tl.where(there, HEAD_DIM // 2, 0)
        channel = within // GROUP_TOKENS * HEAD_DIM + column
        scales = head + PARTS[2] + channel
        offsets = (head + PARTS[1]).to(tl.pointer_type(tl.float16)) + channel
        low_scale = tl.load(scales, mask=wanted, other=0)
        low_offset = tl.load(offsets, mask=wanted, other=0.0)
        high_scale = tl.load(scales + HEAD_DIM // 2, mask=wanted, other=0)
        high_offset = tl.load(offsets + HEAD_DIM // 2, mask=wanted, other=0.0)
        value_scale = tl.load(head + PARTS[5] + token, mask=known, other=0)
        value_offsets = (head + PARTS[4]).to(tl.pointer_type(tl.float16))
        value_offset = tl.load(value_offsets + token, mask=known, other=0.0)
        return low_scale, low_offset, high_scale, high_offset, value_scale, value_offset


@triton.jit
def attend_packed(
    query_low,
    query_high,
    packed,
    table,
    first_tile,
    end_tile,
    start,
    stop,
    row_start,
    scale,
    block_stride,
    page_stride,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
    FAST: tl.constexpr,
    ROW_STARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`attend_tiles` over the packed pages among tiles [first_tile, end_tile).

    `packed` points at the layer and head inside packed page 0. Queries come in two halves of their
    channels, each [ROWS, HALF], float16 or float32, in which is computed; and so do the values. A
    tile lies within a group of tokens that share the scales of their keys.

    Returns:
        [ROWS, HALF] twice, the weighted sums, [ROWS] largest score and [ROWS] sum of weights,
        float32; the sum of weights is 0 where a row saw nothing.
    """
    ROWS: tl.constexpr = query_low.shape[0]
    HALF: tl.constexpr = query_low.shape[1]
    WIDE: tl.constexpr = query_low.dtype == tl.float32
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total_low = tl.zeros((ROWS, HALF), tl.float32)
    total_high = tl.zeros((ROWS, HALF), tl.float32)
    token = tl.arange(0, TILE)
    # Where a tile lies has to be known before its scales can be asked for, and these before its
    # numbers can be used: read two tiles and one tile ahead. What goes from one iteration to the
    # next is computed in it: a loop that only hands a value on is not pipelined.
    entry = _entry(table, first_tile, end_tile, TILE, PAGE_TOKENS)
    ahead = _entry(table, first_tile + 1, end_tile, TILE, PAGE_TOKENS)
    head = _page_of(packed, entry, block_stride, page_stride, PAGES_PER_BLOCK)
    count = tl.where(entry >= PACKED_PAGE, stop - start, 0)
    within = first_tile * TILE % PAGE_TOKENS
    low_scale, low_offset, high_scale, high_offset, value_scale, value_offset = _load_scales(
        head, entry, within, PARTS, FORMAT, GROUP_TOKENS, HEAD_DIM, HALF, TILE
    )
    for tile in range(first_tile, end_tile):
        next_head = _page_of(packed, ahead, block_stride, page_stride, PAGES_PER_BLOCK)
        next_count = tl.where(ahead >= PACKED_PAGE, stop - start, 0)
        next_within = (tile + 1) * TILE % PAGE_TOKENS
        (
            next_low_scale,
            next_low_offset,
            next_high_scale,
            next_high_offset,
            next_value_scale,
            next_value_offset,
        ) = _load_scales(
            next_head, ahead, next_within, PARTS, FORMAT, GROUP_TOKENS, HEAD_DIM,
            HALF, TILE,
        )  # fmt: skip
        ahead = _entry(table, tile + 2, end_tile, TILE, PAGE_TOKENS)

        # One comparison for start <= position < stop: below start wraps round to a large number.
        position = tile * TILE + token
        inside = (position - start).to(tl.uint32) < count.to(tl.uint32)
        if FORMAT == "fp8":
            k_low, k_high = load_halves(
                head + PARTS[0], within + token, inside, low_scale[:, None], low_scale[:, None],
                low_scale[:, None], low_scale[:, None], FORMAT, HEAD_DIM, HALF, WIDE, FAST,
            )  # fmt: skip
            value_scales = value_scale[:, None]
        else:
            k_low, k_high = load_halves(
                head + PARTS[0], within + token, inside, scale_of(low_scale)[None, :],
                low_offset[None, :], scale_of(high_scale)[None, :], high_offset[None, :],
                FORMAT, HEAD_DIM, HALF, WIDE, FAST,
            )  # fmt: skip
            value_scales = scale_of(value_scale)[:, None]
        score = tl.dot(query_low, k_low.T, input_precision=PRECISION)
        score = tl.dot(query_high, k_high.T, acc=score, input_precision=PRECISION) * scale
        seen = inside[None, :]
        if ROW_STARTS:
            seen = seen & (position[None, :] >= row_start[:, None])
        score = tl.where(seen, score, -float("inf"))  # [ROWS, TILE]

        larger = tl.maximum(largest, tl.max(score, 1))
        least = tl.where(larger == -float("inf"), 0.0, larger)
        shrink = tl.exp2(largest - least)
        part = tl.exp2(score - least[:, None])
        weight = weight * shrink + tl.sum(part, 1)
        largest = larger

        v_low, v_high = load_halves(
            head + PARTS[3], within + token, inside, value_scales, value_offset[:, None],
            value_scales, value_offset[:, None], FORMAT, HEAD_DIM, HALF, WIDE, FAST,
        )  # fmt: skip
        part = part.to(v_low.dtype)
        total_low = tl.dot(part, v_low, acc=total_low * shrink[:, None], input_precision=PRECISION)
        total_high = tl.dot(
            part, v_high, acc=total_high * shrink[:, None], input_precision=PRECISION
        )
        head, count, within = next_head, next_count, next_within
        low_scale, low_offset = next_low_scale, next_low_offset
        high_scale, high_offset = next_high_scale, next_high_offset
        value_scale, value_offset = next_value_scale, next_value_offset
    return total_low, total_high, largest, weight


@triton.jit
def load_query_halves(query, real, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Queries in two halves of their channels, each [ROWS, HALF], float16, or float32 if WIDE.

    Args:
        query: [ROWS], pointers.
        real: [ROWS], those that are read; the others are zeros.
    """
    HALF: tl.constexpr = DIM // 2 if DIM >= 32 else 16
    column = tl.arange(0, HALF)
    wanted = real[:, None] & (column < HEAD_DIM // 2)[None, :]
    at = query[:, None] + column[None, :]
    low = tl.load(at, mask=wanted, other=0.0)
    high = tl.load(at + HEAD_DIM // 2, mask=wanted, other=0.0)
    if WIDE:
        return low, high
    else:
        return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def store_halves(out, low, high, real, HEAD_DIM: tl.constexpr):
    """Store rows that come in two halves of their channels; `out`: [ROWS], pointers."""
    column = tl.arange(0, low.shape[1])
    wanted = real[:, None] & (column < HEAD_DIM // 2)[None, :]
    at = out[:, None] + column[None, :]
    tl.store(at, low.to(out.dtype.element_ty), mask=wanted)
    tl.store(at + HEAD_DIM // 2, high.to(out.dtype.element_ty), mask=wanted)
