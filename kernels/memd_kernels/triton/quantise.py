"""Quantises keys and values of a page and writes them as packed ones."""

import triton
import triton.language as tl

from memd_kernels.reference.packed import FP8_MAX, FP16_MAX, MAX_BASE
from memd_kernels.triton.unpack import byte_of, scale_of

_FP8_MAX = tl.constexpr(FP8_MAX)
_FP16_MAX = tl.constexpr(FP16_MAX)
_MAX_BASE = tl.constexpr(MAX_BASE)


@triton.jit
def _round(x):
    # Half to even, as torch does: adding this leaves no bits for a fraction.
    return x + 12582912.0 - 12582912.0


@triton.jit
def _quantise(x, wanted, BITS: tl.constexpr, AXIS: tl.constexpr, TRIED: tl.constexpr):
    """As `reference.packed.quantise` of groups along an axis; elements not wanted count nowhere.

    Returns:
        Codes, float32, of the shape of `x`; offsets, float16, and scale bytes, int32, of size 1
        along the axis; and what the codes stand for.
    """
    MOST: tl.constexpr = 2**BITS - 1
    BASE: tl.constexpr = 64 if BITS == 4 else 1024
    low = tl.min(tl.where(wanted, x, float("inf")), AXIS, keep_dims=True)
    high = tl.max(tl.where(wanted, x, -float("inf")), AXIS, keep_dims=True)
    count = tl.sum(wanted.to(tl.float32), AXIS, keep_dims=True)
    low = tl.where(count > 0, low, 0.0)
    high = tl.where(count > 0, high, 0.0)
    centre = low / 2 + high / 2
    reach = tl.minimum(tl.maximum(high / MOST - low / MOST, 0.0), _MAX_BASE / BASE)
    covering = (reach.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) + 127) >> 7
    best_offset = tl.zeros_like(centre).to(tl.float16)
    best_byte = tl.zeros_like(covering)
    least = tl.full(centre.shape, float("inf"), tl.float32)
    for step in range(TRIED):  # not unrolled: a fifth of the code
        byte = tl.maximum(covering - step, 0)
        scale = scale_of(byte).to(tl.float32)
        divisor = tl.where(scale > 0, scale, 1.0)
        codes = _clamp(_round((x - centre) / divisor + MOST / 2), MOST)
        mean = tl.sum(tl.where(wanted, x - scale * codes, 0.0), AXIS, keep_dims=True)
        mean = mean / tl.maximum(count, 1.0) - scale * BASE
        offset = tl.minimum(tl.maximum(mean, -_FP16_MAX), _FP16_MAX).to(tl.float16)
        minimum = offset.to(tl.float32) + scale * BASE
        codes = _clamp(_round((x - minimum) / divisor), MOST)
        lost = x - minimum - scale * codes
        error = tl.sum(tl.where(wanted, lost * lost, 0.0), AXIS, keep_dims=True)
        better = error < least
        best_offset = tl.where(better, offset, best_offset)
        best_byte = tl.where(better, byte, best_byte)
        least = tl.where(better, error, least)
    scale = scale_of(best_byte).to(tl.float32)  # not kept in the loop: fewer registers
    minimum = best_offset.to(tl.float32) + scale * BASE
    codes = _clamp(_round((x - minimum) / tl.where(scale > 0, scale, 1.0)), MOST)
    return codes, best_offset, best_byte, minimum + scale * codes


@triton.jit
def _rounded(x):
    """The nearest numbers of e4m3, which Triton 3.6 reads wrong when it has just made them."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, 0.015625) * 0.125
    return _round(x / step) * step


@triton.jit
def _clamp(codes, MOST: tl.constexpr):
    return tl.minimum(tl.maximum(codes, 0.0), MOST)


@triton.jit
def pack_side(
    at,
    head,
    sums,
    first,
    CODES: tl.constexpr,
    OFFSETS: tl.constexpr,
    SCALES: tl.constexpr,
    KEYS: tl.constexpr,
    FORMAT: tl.constexpr,
    TRIED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
):
    """Pack keys of a group of tokens, or values of a unit, from token `first` of a page on.

    `at` points at them, `head` at where they go.
    """
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    token = tl.arange(0, TOKENS)
    index = tl.arange(0, 2 * HALF)  # halves of the channels, padded
    channel = index // HALF * HALF_DIM + index % HALF
    known = (index % HALF < HALF_DIM)[None, :]
    wanted = (token >= 0)[:, None] & known
    x = tl.load(at + token[:, None] * HEAD_DIM + channel[None, :], mask=wanted, other=0.0)
    x = x.to(tl.float32)  # [TOKENS, 2 * HALF]
    if FORMAT == "fp8":
        scale = (tl.max(tl.abs(x), 1, keep_dims=True) / _FP8_MAX).to(tl.float16)
        wide = scale.to(tl.float32)
        number = x / tl.where(wide > 0, wide, 1.0)
        number = tl.minimum(tl.maximum(number, -_FP8_MAX), _FP8_MAX)
        read = _rounded(number) * wide
        number = number.to(tl.float8e4nv)
        scales = (head + SCALES).to(tl.pointer_type(tl.float16))
        tl.store(scales + first + token[:, None], scale)
        codes = number.to(tl.uint8, bitcast=True)
    else:
        BITS: tl.constexpr = 4 if FORMAT == "int4" else 8
        offsets = (head + OFFSETS).to(tl.pointer_type(tl.float16))
        scales = head + SCALES
        codes, offset, byte, read = _quantise(x, wanted, BITS, 0 if KEYS else 1, TRIED)
        if KEYS:
            side_at = first // TOKENS * HEAD_DIM + channel[None, :]
            tl.store(offsets + side_at, offset, mask=known)
            tl.store(scales + side_at, byte.to(tl.uint8), mask=known)
        else:
            tl.store(offsets + first + token[:, None], offset)
            tl.store(scales + first + token[:, None], byte.to(tl.uint8))
        codes = codes.to(tl.int32)
    lost = tl.where(wanted, x - read, 0.0)
    tl.store(sums, tl.sum(lost * lost))
    tl.store(sums + 1, tl.sum(x * x))

    if KEYS:
        row_at = (
            head
            + CODES
            + (first + token)[:, None] * (HEAD_DIM * 4 // 8 if FORMAT == "int4" else HEAD_DIM)
        )
    if FORMAT == "int4":
        # Upper and lower halves of a byte are different bits: their sum is both.
        shift = tl.arange(0, 2) * 4
        if KEYS:
            column = tl.arange(0, HALF)
            halves = tl.reshape(codes, (TOKENS, 2, HALF))
            both = tl.sum(halves << shift[None, :, None], 1).to(tl.uint8)
            code_at = row_at + byte_of(column, FORMAT)[None, :]
            tl.store(code_at, both, mask=(token >= 0)[:, None] & (column < HALF_DIM)[None, :])
        else:
            half = tl.arange(0, TOKENS // 2)
            halves = tl.reshape(codes, (2, TOKENS // 2, 2 * HALF))
            both = tl.sum(halves << shift[:, None, None], 0).to(tl.uint8)
            code_at = head + CODES + channel[:, None] * (PAGE_TOKENS // 2) + first // 2
            code_at += byte_of(half, FORMAT)[None, :]
            tl.store(code_at, both.T, mask=known.T & (half >= 0)[None, :])
    elif KEYS:
        tl.store(row_at + channel[None, :], codes.to(tl.uint8), mask=wanted)
    else:
        code_at = head + CODES + channel[:, None] * PAGE_TOKENS + (first + token)[None, :]
        tl.store(code_at, codes.to(tl.uint8).T, mask=wanted.T)
