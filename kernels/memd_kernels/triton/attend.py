"""What the kernels for decoding share: attention of a few query rows over the pages of a table."""

import torch
import triton
import triton.language as tl

from memd_kernels import launch
from memd_kernels.triton.unpack import PACKED_PAGE

LOG2_E = 1.4426950408889634
MIN_SIDE = 16  # of a matrix product
COMBINED_RUN = tl.constexpr(4)  # elements that a thread reads at once


@triton.jit
def _page_of(table, tile, stop, TILE: tl.constexpr, PAGE_TOKENS: tl.constexpr):
    """The page of a tile, or the page of each of its tokens where pages are shorter."""
    position = tile * TILE
    if TILE > PAGE_TOKENS:
        position += tl.arange(0, TILE)
    return tl.load(table + position // PAGE_TOKENS, mask=position < stop, other=0)


@triton.jit
def _skip(tile, gap_at, gap, MIXED: tl.constexpr):
    if MIXED:
        tile += tl.where(tile >= gap_at, gap, 0)
    return tile


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
    gap_at=0,
    gap=0,
    MIXED: tl.constexpr = False,
    STAGES: tl.constexpr = None,
    STAGED: tl.constexpr = False,
    real=True,
    never=False,
):
    """Softmax-weighted values of tokens [start, stop) of one page table, by log base 2.

    `keys` points at the layer and head inside page 0. With ROW_STARTS each row of the query sees
    tokens from its own `row_start` on; a row may then see none of a tile. With MIXED the table may
    name packed pages, which are passed over; tiles from number `gap_at` on lie `gap` tiles later.
    STAGES: of this loop; None: as the kernel is launched. With STAGED `query` points at the rows,
    of which those that are `real` are read anew with each tile, so that keys are asked for without
    a wait for them; `never` is false, which the compiler must not know: it would read them once.

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
    ahead = _page_of(table, _skip(first_tile, gap_at, gap, MIXED), stop, TILE, PAGE_TOKENS)
    for index in tl.range(first_tile, end_tile, num_stages=STAGES):
        tile = _skip(index, gap_at, gap, MIXED)
        page = ahead.to(tl.int64)
        ahead = _page_of(table, _skip(index + 1, gap_at, gap, MIXED), stop, TILE, PAGE_TOKENS)
        base = page // PAGES_PER_BLOCK * block_stride + page % PAGES_PER_BLOCK * page_stride
        if TILE <= PAGE_TOKENS:
            at = keys + (base + tile * TILE % PAGE_TOKENS * HEAD_DIM)
            at += token[:, None] * HEAD_DIM + column[None, :]
        else:
            at = keys + (base + token % PAGE_TOKENS * HEAD_DIM)[:, None] + column[None, :]
        # One comparison for start <= position < stop: below start wraps round to a large number.
        count = stop - start
        if MIXED:
            count = tl.where(page < PACKED_PAGE, count, 0)
        position = tile * TILE + token
        valid = (position - start).to(tl.uint32) < count.to(tl.uint32)
        # Masked loads fill with zeros: what lies beyond a sequence, NaN too, is not even read.
        inside = valid[:, None] & (column < HEAD_DIM)[None, :]
        k = tl.load(at, mask=inside, other=0.0)  # [TILE, DIM]
        rows = query
        if STAGED:
            at_query = query + tl.multiple_of(index * never.to(tl.int32), 16)
            rows = tl.load(at_query, mask=real, other=0.0)
        score = tl.dot(rows, k.T, input_precision=PRECISION) * scale  # [ROWS, TILE]
        seen = valid[None, :]
        if ROW_STARTS:
            seen = seen & (position[None, :] >= row_start[:, None])
        score = tl.where(seen, score, -float("inf"))

        larger = tl.maximum(largest, tl.max(score, 1))
        least = larger
        if ROW_STARTS or MIXED:
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
def combined_at(
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr
):
    """Where the elements of what `combine` returns lie: a run of one head's columns a lane.

    Returns:
        [LANES] query heads; [LANES] first columns; [LANES, RUN] offsets in [GROUP, HEAD_DIM], and
        whether they are there.
    """
    LANES: tl.constexpr = HEADS * DIM // COMBINED_RUN
    lane = tl.arange(0, LANES) * COMBINED_RUN
    query_head, first = lane // DIM, lane % DIM
    column = first[:, None] + tl.arange(0, COMBINED_RUN)[None, :]
    real = (query_head < GROUP)[:, None] & (column < HEAD_DIM)
    return query_head, first, query_head[:, None] * HEAD_DIM + column, real


@triton.jit
def combine(
    parts,
    logs,
    first_slot,
    stride,
    count,
    prefix_slot,
    prefix_count,
    head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    STEP: tl.constexpr,
):
    """Put together parts of one row and KV head, own and of the shared prefix, in order.

    Own parts are in every `stride`-th slot from `first_slot` on. Lanes are the first axis, along
    which threads are spread: each has all parts of its elements and their logs, and waits for no
    other thread.

    Returns:
        [LANES, RUN] weighted mean and [LANES] log base 2 of the sum of weights, as `combined_at`.
    """
    query_head, _, within, real = combined_at(GROUP, HEAD_DIM, HEADS, DIM)
    LANES: tl.constexpr = within.shape[0]
    first_at = (first_slot.to(tl.int64) * KV_HEADS + head) * GROUP
    lane_logs = logs + (first_at + query_head)[:, None]
    lane_parts = parts + (first_at * HEAD_DIM + within)[:, None, :]
    largest = tl.full((LANES,), -float("inf"), tl.float32)
    weight = tl.zeros((LANES,), tl.float32)
    total = tl.zeros((LANES, COMBINED_RUN), tl.float32)
    for done in range(0, count + prefix_count, STEP):
        index = done + tl.arange(0, STEP)
        there = index < count + prefix_count
        own, other = index * stride, prefix_slot - first_slot + index - count
        at = tl.where(index < count, own, other).to(tl.int64) * (KV_HEADS * GROUP)
        # Other multiprocessors wrote these while this kernel ran: not through the first cache.
        log = tl.load(  # [LANES, STEP]
            lane_logs + at[None, :],
            mask=there[None, :] & (query_head < GROUP)[:, None],
            other=-float("inf"),
            cache_modifier=".cg",
        )
        part = tl.load(  # [LANES, STEP, RUN]
            lane_parts + (at * HEAD_DIM)[None, :, None],
            mask=there[None, :, None] & real[:, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        larger = tl.maximum(largest, tl.max(log, 1))
        base = tl.where(larger == -float("inf"), 0.0, larger)
        shrink = tl.exp2(largest - base)
        share = tl.exp2(log - base[:, None])
        weight = weight * shrink + tl.sum(share, 1)
        total = total * shrink[:, None] + tl.sum(part * share[:, :, None], 1)
        largest = larger
    return normalise(total, largest, weight)


def padded(dim: int) -> int:
    """Head dimension as a side of a matrix product."""
    return launch.bucket(max(dim, MIN_SIDE))


def precision(dtype: torch.dtype) -> str:
    """Input precision of products; for all but float32 it says nothing."""
    return "ieee" if dtype == torch.float32 else "tf32"
