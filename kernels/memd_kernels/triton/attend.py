"""What the kernels for decoding share: attention of a few query rows over the pages of a table."""

import torch
import triton
import triton.language as tl

from memd_kernels import launch

LOG2_E = 1.4426950408889634
MIN_SIDE = 16  # of a matrix product


@triton.jit
def _page_of(table, tile, stop, TILE: tl.constexpr, PAGE_TOKENS: tl.constexpr):
    """The page of a tile, or the page of each of its tokens where pages are shorter."""
    position = tile * TILE
    if TILE > PAGE_TOKENS:
        position += tl.arange(0, TILE)
    return tl.load(table + position // PAGE_TOKENS, mask=position < stop, other=0)


@triton.jit
def attend_tiles(
    query,
    keys,
    table,
    first_tile,
    end_tile,
    start,
    stop,
    row_start,
    scale,
    block_stride,
    page_stride,
    value_stride,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    ROW_STARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Softmax-weighted values of tokens [start, stop) of one page table, by log base 2.

    `keys` points at the layer and head inside page 0. With ROW_STARTS each row of the query sees
    tokens from its own `row_start` on; a row may then see none of a tile.

    Returns:
        [ROWS, DIM] weighted sum, [ROWS] largest score and [ROWS] sum of weights, float32; the sum
        of weights is 0 where a row saw nothing.
    """
    ROWS: tl.constexpr = query.shape[0]
    DIM: tl.constexpr = query.shape[1]
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, DIM), tl.float32)
    column = tl.arange(0, DIM)
    token = tl.arange(0, TILE)
    # Where a tile's page is has to be known before its keys can be asked for: read a tile ahead.
    ahead = _page_of(table, first_tile, stop, TILE, PAGE_TOKENS)
    for tile in range(first_tile, end_tile):
        page = ahead.to(tl.int64)
        ahead = _page_of(table, tile + 1, stop, TILE, PAGE_TOKENS)
        base = page // PAGES_PER_BLOCK * block_stride + page % PAGES_PER_BLOCK * page_stride
        if TILE <= PAGE_TOKENS:
            at = keys + (base + tile * TILE % PAGE_TOKENS * HEAD_DIM)
            at += token[:, None] * HEAD_DIM + column[None, :]
        else:
            at = keys + (base + token % PAGE_TOKENS * HEAD_DIM)[:, None] + column[None, :]
        # One comparison for start <= position < stop: below start wraps round to a large number.
        position = tile * TILE + token
        valid = (position - start).to(tl.uint32) < (stop - start).to(tl.uint32)
        # Masked loads fill with zeros: what lies beyond a sequence, NaN too, is not even read.
        inside = valid[:, None] & (column < HEAD_DIM)[None, :]
        k = tl.load(at, mask=inside, other=0.0)  # [TILE, DIM]
        score = tl.dot(query, k.T, input_precision=PRECISION) * scale  # [ROWS, TILE]
        seen = valid[None, :]
        if ROW_STARTS:
            seen = seen & (position[None, :] >= row_start[:, None])
        score = tl.where(seen, score, -float("inf"))

        larger = tl.maximum(largest, tl.max(score, 1))
        least = larger
        if ROW_STARTS:
            least = tl.where(larger == -float("inf"), 0.0, larger)
        shrink = tl.exp2(largest - least)
        part = tl.exp2(score - least[:, None])
        weight = weight * shrink + tl.sum(part, 1)
        largest = larger

        v = tl.load(at + value_stride, mask=inside, other=0.0)  # [TILE, DIM]
        total = tl.dot(part.to(v.dtype), v, acc=total * shrink[:, None], input_precision=PRECISION)
    return total, largest, weight


@triton.jit
def normalise(total, largest, weight):
    """Weighted mean and log base 2 of the sum of weights; zeros and -inf where nothing was seen."""
    weight = tl.where(weight > 0, weight, 1.0)
    return total / weight[:, None], largest + tl.log2(weight)


@triton.jit
def joined(total, largest, weight, other_total, other_largest, other_weight):
    """What `attend_tiles` returns of two runs of tokens as if they were one."""
    larger = tl.maximum(largest, other_largest)
    base = tl.where(larger == -float("inf"), 0.0, larger)
    shrink, other_shrink = tl.exp2(largest - base), tl.exp2(other_largest - base)
    total = total * shrink[:, None] + other_total * other_shrink[:, None]
    return total, larger, weight * shrink + other_weight * other_shrink


def padded(dim: int) -> int:
    """Head dimension as a side of a matrix product."""
    return launch.bucket(max(dim, MIN_SIDE))


def precision(dtype: torch.dtype) -> str:
    """Input precision of products; for all but float32 it says nothing."""
    return "ieee" if dtype == torch.float32 else "tf32"
