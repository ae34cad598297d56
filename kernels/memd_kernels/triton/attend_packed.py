"""Attention of a few query rows over the packed pages of a table.

A loop goes over one format only and passes over pages of the other, so that each keeps its own
loads in flight: a branch inside the loop would wait for every page.

Tokens, or channels, are the rows of each matrix product and queries its columns: few queries then
fill a narrow product, half of what they would waste as rows. Keys are unpacked to what they stand
for; the scales of values go into the weights instead, where there are far fewer numbers, and what
the codes are off by is taken from a sum that is kept beside.

A step takes a unit of tokens: of `int4` in two halves, which lie in the halves of the bytes of the
values, of other formats at once, so that rows are read whole.
"""

import triton
import triton.language as tl

from memd_kernels.triton.unpack import (
    PACKED_PAGE,
    load_key_bytes,
    load_key_nibbles,
    load_value_bytes,
    load_value_nibbles,
    scale_of,
)

MIN_COLUMNS = tl.constexpr(8)  # of a matrix product


@triton.jit
def _entry(table, unit, end_unit, UNIT: tl.constexpr, PAGE_TOKENS: tl.constexpr):
    """The page table's entry of a unit; 0, which is no packed page, past the end."""
    return tl.load(table + unit * UNIT // PAGE_TOKENS, mask=unit < end_unit, other=0)


@triton.jit
def _within(unit, UNIT: tl.constexpr, PAGE_TOKENS: tl.constexpr):
    """First token of a unit within its page; loads are as wide as this is known to be round."""
    return tl.multiple_of(unit * UNIT % PAGE_TOKENS, UNIT)


@triton.jit
def _page_of(packed, entry, block_stride, page_stride, PAGES_PER_BLOCK: tl.constexpr):
    page = (entry & (PACKED_PAGE - 1)).to(tl.int64)
    return packed + page // PAGES_PER_BLOCK * block_stride + page % PAGES_PER_BLOCK * page_stride


@triton.jit
def _key_scales(
    head,
    group,
    first,
    there,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Scales, as bytes, and offsets of some channels of a group's keys, each [SIZE]."""
    channel = tl.arange(0, SIZE)
    wanted = channel < tl.where(there, CHANNELS, 0)
    at = group * HEAD_DIM + first + channel
    offsets = (head + PARTS[1]).to(tl.pointer_type(tl.float16))
    return (
        tl.load(head + PARTS[2] + at, mask=wanted, other=0),
        tl.load(offsets + at, mask=wanted, other=0.0),
    )


@triton.jit
def _load_scales(
    head,
    entry,
    within,
    PARTS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HALF_UNIT: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Scales and offsets of a unit: of values, of keys; of `int4` those of both halves.

    Where nothing is packed they are zeros, which make zeros of everything.
    """
    there = entry >= PACKED_PAGE
    token = within + tl.arange(0, SIDE)
    if FORMAT == "fp8":
        key_scales = (head + PARTS[2]).to(tl.pointer_type(tl.float16)) + token
        value_scales = (head + PARTS[5]).to(tl.pointer_type(tl.float16)) + token
        known = token < tl.where(there, within + SIDE, 0)
        return (
            tl.load(value_scales, mask=known, other=0.0),
            tl.load(key_scales, mask=known, other=0.0),
        )
    else:
        scales = head + PARTS[5] + token
        offsets = (head + PARTS[4]).to(tl.pointer_type(tl.float16)) + token
        group = within // GROUP_TOKENS
        if FORMAT == "int8":
            known = token < tl.where(there, within + SIDE, 0)
            values = (
                tl.load(scales, mask=known, other=0),
                tl.load(offsets, mask=known, other=0.0),
            )
            return values + _key_scales(head, group, 0, there, PARTS, HEAD_DIM, HEAD_DIM, DIM)
        else:
            known = token < tl.where(there, within + HALF_UNIT, 0)
            halves = (
                tl.load(scales, mask=known, other=0),
                tl.load(offsets, mask=known, other=0.0),
                tl.load(scales + HALF_UNIT, mask=known, other=0),
                tl.load(offsets + HALF_UNIT, mask=known, other=0.0),
            )
            HALF: tl.constexpr = HEAD_DIM // 2
            SIZE: tl.constexpr = DIM // 2 if DIM >= 32 else 16
            low = _key_scales(head, group, 0, there, PARTS, HEAD_DIM, HALF, SIZE)
            high = _key_scales(head, group, HALF, there, PARTS, HEAD_DIM, HALF, SIZE)
            if GROUP_TOKENS > HALF_UNIT:
                return halves + low + high
            else:
                next_low = _key_scales(head, group + 1, 0, there, PARTS, HEAD_DIM, HALF, SIZE)
                next_high = _key_scales(head, group + 1, HALF, there, PARTS, HEAD_DIM, HALF, SIZE)
                return halves + low + high + next_low + next_high


@triton.jit
def _scores(
    queries,
    head,
    within,
    there,
    scales,
    SECOND: tl.constexpr,
    PARTS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_UNIT: tl.constexpr,
    SIDE: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores [SIDE, COLUMNS] of a unit, or of one half of it, before they are scaled."""
    SIZE: tl.constexpr = queries[0].shape[0]
    WIDE: tl.constexpr = queries[0].dtype == tl.float32
    if FORMAT == "int4":
        first = within + (HALF_UNIT if SECOND else 0)
        AT: tl.constexpr = 8 if SECOND and GROUP_TOKENS <= HALF_UNIT else 4
        low, high = load_key_nibbles(
            head + PARTS[0], first, there, scale_of(scales[AT], FAST), scales[AT + 1],
            scale_of(scales[AT + 2], FAST), scales[AT + 3], HEAD_DIM, SIZE, HALF_UNIT, SIDE, WIDE,
            FAST,
        )  # fmt: skip
        score = tl.dot(low, queries[0], input_precision=PRECISION)
        return tl.dot(high, queries[1], acc=score, input_precision=PRECISION)
    elif FORMAT == "int8":
        keys = load_key_bytes(
            head + PARTS[0], within, there, scale_of(scales[2], FAST), scales[3], FORMAT, HEAD_DIM,
            SIZE, SIDE, WIDE, FAST,
        )  # fmt: skip
        return tl.dot(keys, queries[0], input_precision=PRECISION)
    else:
        keys = load_key_bytes(
            head + PARTS[0], within, there, 0, 0, FORMAT, HEAD_DIM, SIZE, SIDE, WIDE, FAST
        )
        score = tl.dot(keys, queries[0], input_precision=PRECISION)
        return score * scales[1].to(tl.float32)[:, None]


@triton.jit
def _weigh(
    weight,
    scales,
    SECOND: tl.constexpr,
    FORMAT: tl.constexpr,
    FAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Weights for the codes of values of a unit, or one half of it, and what these are off by.

    Returns:
        [SIDE, COLUMNS], in what is computed in; the same, float32: what a value's offset adds, less
        what the codes are off by. It is computed of the rounded weights, so that it is exact.
    """
    AT: tl.constexpr = 2 if SECOND else 0
    if FORMAT == "fp8":
        scaled = weight * scales[AT].to(tl.float32)[:, None]
        return (scaled if WIDE else scaled.to(tl.float16)), tl.zeros_like(weight)
    else:
        step = scale_of(scales[AT], FAST).to(tl.float32)
        BASE: tl.constexpr = 64.0 if FORMAT == "int4" else 1024.0
        least = scales[AT + 1].to(tl.float32) + BASE * step
        if FAST and SECOND:  # whose codes come 16 times as large
            step *= 0.0625
        scaled = weight * step[:, None]
        rest = weight * least[:, None]
        if WIDE:
            return scaled, rest
        else:
            scaled = scaled.to(tl.float16)
            if FAST:
                rest -= 1024.0 * scaled.to(tl.float32)
            return scaled, rest


@triton.jit
def attend_packed(
    queries,
    packed,
    table,
    first_unit,
    end_unit,
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
    DIM: tl.constexpr,
    UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
    FAST: tl.constexpr,
    ROW_STARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`attend_tiles` and `normalise` over the packed pages among units [first_unit, end_unit).

    `packed` points at the layer and head inside packed page 0; `queries` is of `load_queries`.

    Returns:
        [DIM, COLUMNS] weighted mean and [COLUMNS] log base 2 of the sum of weights, float32; zeros
        and -inf where a query saw nothing.
    """
    COLUMNS: tl.constexpr = queries[0].shape[1]
    WIDE: tl.constexpr = queries[0].dtype == tl.float32
    NIBBLES: tl.constexpr = FORMAT == "int4"
    HALF_UNIT: tl.constexpr = UNIT // 2
    SIDE: tl.constexpr = max(HALF_UNIT, 16) if NIBBLES else UNIT
    ROOM: tl.constexpr = HALF_UNIT if NIBBLES else UNIT
    largest = tl.full((COLUMNS,), -float("inf"), tl.float32)
    weight = tl.zeros((SIDE, COLUMNS), tl.float32)
    rest = tl.zeros((SIDE, COLUMNS), tl.float32)
    total = tl.zeros((DIM, COLUMNS), tl.float32)
    token = tl.arange(0, SIDE)
    # Where a unit lies has to be known before its scales can be asked for, and these before its
    # numbers can be used: read two units and one unit ahead. What goes from one iteration to the
    # next is computed in it: a loop that only hands a value on is not pipelined.
    entry = _entry(table, first_unit, end_unit, UNIT, PAGE_TOKENS)
    ahead = _entry(table, first_unit + 1, end_unit, UNIT, PAGE_TOKENS)
    head = _page_of(packed, entry, block_stride, page_stride, PAGES_PER_BLOCK)
    there = entry >= PACKED_PAGE
    scales = _load_scales(
        head, entry, _within(first_unit, UNIT, PAGE_TOKENS), PARTS, FORMAT, GROUP_TOKENS, HEAD_DIM,
        DIM, HALF_UNIT, SIDE,
    )  # fmt: skip
    for unit in range(first_unit, end_unit):
        next_head = _page_of(packed, ahead, block_stride, page_stride, PAGES_PER_BLOCK)
        next_there = ahead >= PACKED_PAGE
        next_within = _within(unit + 1, UNIT, PAGE_TOKENS)
        next_scales = _load_scales(
            next_head, ahead, next_within, PARTS, FORMAT, GROUP_TOKENS, HEAD_DIM, DIM, HALF_UNIT,
            SIDE,
        )  # fmt: skip
        ahead = _entry(table, unit + 2, end_unit, UNIT, PAGE_TOKENS)

        within = _within(unit, UNIT, PAGE_TOKENS)
        known = token < tl.where(there, ROOM, 0)
        # One comparison for start <= position < stop: below start wraps round to a large number.
        position = unit * UNIT + token
        count = (stop - start).to(tl.uint32)
        seen = (known & ((position - start).to(tl.uint32) < count))[:, None]
        if ROW_STARTS:
            seen = seen & (position[:, None] >= row_start[None, :])
        score = scale * _scores(
            queries, head, within, there, scales, False, PARTS, FORMAT, GROUP_TOKENS, HEAD_DIM,
            HALF_UNIT, SIDE, FAST, PRECISION,
        )  # fmt: skip
        score = tl.where(seen, score, -float("inf"))
        top = tl.max(score, 0)
        if NIBBLES:
            position += HALF_UNIT
            seen = (known & ((position - start).to(tl.uint32) < count))[:, None]
            if ROW_STARTS:
                seen = seen & (position[:, None] >= row_start[None, :])
            second = scale * _scores(
                queries, head, within, there, scales, True, PARTS, FORMAT, GROUP_TOKENS, HEAD_DIM,
                HALF_UNIT, SIDE, FAST, PRECISION,
            )  # fmt: skip
            second = tl.where(seen, second, -float("inf"))
            top = tl.maximum(top, tl.max(second, 0))

        larger = tl.maximum(largest, top)
        least = tl.where(larger == -float("inf"), 0.0, larger)
        shrink = tl.exp2(largest - least)[None, :]
        largest = larger
        # Sums over the tokens are made at the end only: adding up across a warp is dear.
        part = tl.exp2(score - least[None, :])
        weight = weight * shrink + part
        scaled, more = _weigh(part, scales, False, FORMAT, FAST, WIDE)
        rest = rest * shrink + more
        if NIBBLES:
            part = tl.exp2(second - least[None, :])
            weight += part
            second_scaled, more = _weigh(part, scales, True, FORMAT, FAST, WIDE)
            rest += more
            values, second_values = load_value_nibbles(
                head + PARTS[3], within, there, HEAD_DIM, DIM, PAGE_TOKENS, UNIT, SIDE, WIDE, FAST
            )
            found = tl.dot(values, scaled, input_precision=PRECISION)
            found = tl.dot(second_values, second_scaled, acc=found, input_precision=PRECISION)
        else:
            values = load_value_bytes(
                head + PARTS[3], within, there, FORMAT, HEAD_DIM, DIM, PAGE_TOKENS, SIDE, WIDE, FAST
            )
            found = tl.dot(values, scaled, input_precision=PRECISION)
        # Matrix units cut off what a sum has no bits for, and a code is 1024 more than it is: one
        # sum over all units would lose the more of the codes the longer it gets.
        total = tl.fma(total, shrink, found)
        head, there, scales = next_head, next_there, next_scales
    sums = tl.sum(weight, 0)
    sums = tl.where(sums > 0, sums, 1.0)
    return (total + tl.sum(rest, 0)[None, :]) / sums[None, :], largest + tl.log2(sums)


@triton.jit
def load_queries(
    query,
    real,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Queries as columns, float16, or float32 if WIDE, in which is computed.

    Args:
        query: [COLUMNS], pointers.
        real: [COLUMNS], those that are read; the others are zeros.

    Returns:
        Of `int4` both halves of the channels, each [DIM / 2, COLUMNS]; else [DIM, COLUMNS] alone.
    """
    if FORMAT == "int4":
        HALF: tl.constexpr = HEAD_DIM // 2
        SIZE: tl.constexpr = DIM // 2 if DIM >= 32 else 16
        low = _load_columns(query, real, HALF, SIZE, WIDE)
        return low, _load_columns(query + HALF, real, HALF, SIZE, WIDE)
    else:
        return (_load_columns(query, real, HEAD_DIM, DIM, WIDE),)


@triton.jit
def _load_columns(at, real, CHANNELS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr):
    channel = tl.arange(0, SIZE)
    wanted = real[None, :] & (channel < CHANNELS)[:, None]
    x = tl.load(at[None, :] + channel[:, None], mask=wanted, other=0.0)
    if WIDE:
        return x
    else:
        return x.to(tl.float16)


@triton.jit
def store_columns(out, mean, real, HEAD_DIM: tl.constexpr):
    """Store [DIM, COLUMNS] as a row for each query; `out`: [COLUMNS], pointers."""
    channel = tl.arange(0, mean.shape[0])
    wanted = real[None, :] & (channel < HEAD_DIM)[:, None]
    tl.store(out[None, :] + channel[:, None], mean.to(out.dtype.element_ty), mask=wanted)
