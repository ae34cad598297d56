"""Float32 weights in one or two bytes a number, and their products with a few rows.

A step of a few rows takes as long as its weights take to be read. Those of a quantised file are at
most 256 numbers in each block of 32, evenly spaced; those of a bfloat16 file end in two bytes of
zero. A form is taken only if it gives back every number.
"""

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from memd_kernels.cpu.jit import kernel, part, threads
from memd_kernels.cpu.lanes import LANES, fma, load, put, splat, spread, store
from memd_kernels.narrow import NarrowWeight

BLOCK = 32  # of the files' formats; those with 16 values to a block stay wide


def narrow_weight(weight: Tensor) -> NarrowWeight | None:
    """`memd_kernels.narrow.narrow_weight`, of float32."""
    count, size = weight.shape
    if count % LANES:
        return None
    bits = weight.view(torch.int32)
    if not (bits[:1] & 0xFFFF).any() and not (bits & 0xFFFF).any():
        none = np.empty((count // LANES, 0, LANES), np.float32)
        return NarrowWeight(_side_by_side((bits >> 16).to(torch.int16)), none, none)
    if size % BLOCK:
        return None
    codes = torch.empty(count, size, dtype=torch.uint8)
    steps, lows = torch.empty(2, count, size // BLOCK)
    if not _find_codes(weight.numpy(), codes.numpy(), steps.numpy(), lows.numpy(), threads()):
        return None
    return NarrowWeight(_side_by_side(codes), _side_by_side(steps), _side_by_side(lows))


def _side_by_side(rows: Tensor) -> Any:
    """[N, K] to [N / 8, K, 8]."""
    return rows.view(-1, LANES, rows.shape[1]).transpose(1, 2).contiguous().numpy()


@part
def _find_step(block: Any, low: Any, spread: Any) -> Any:
    """The greatest common divisor of what values are above the least; -1 if it is too small.

    By Euclid: the remainder of a division of floats is exact.
    """
    step = np.float32(0)
    for value in block:
        rest = value - low
        if step > 0 and np.rint(rest / step) * step == rest:
            continue
        while rest > 0:
            if rest * np.float32(255) < spread:
                return np.float32(-1)
            step, rest = rest, np.fmod(step, rest)
    return step


@part
def _code_block(block: Any, codes: Any) -> Any:
    """Codes of a block: its step and least value, and whether they give back every number."""
    low = block.min()
    spread = block.max() - low
    step = _find_step(block, low, spread) if spread < np.inf else np.float32(-1)
    exact = step >= 0
    for i in range(len(block)):
        code = np.rint((block[i] - low) / step) if step > 0 else np.float32(0)
        codes[i] = np.uint8(code)
        # The product has 32 bits and is exact in float64.
        exact &= np.float64(codes[i]) * np.float64(step) + np.float64(low) == block[i]
    return step, low, exact


@kernel("b1(f4[:,::1], u1[:,::1], f4[:,::1], f4[:,::1], i8)", parallel=True)
def _find_codes(weight: Any, codes: Any, steps: Any, lows: Any, num_parts: int) -> bool:
    exact = np.ones(num_parts, np.bool_)
    for share in numba.prange(num_parts):
        first, last = len(weight) * share // num_parts, len(weight) * (share + 1) // num_parts
        for row in range(first, last):
            for block in range(steps.shape[1]):
                at = block * BLOCK
                step, low, found = _code_block(
                    weight[row, at : at + BLOCK], codes[row, at : at + BLOCK]
                )
                steps[row, block], lows[row, block] = step, low
                exact[share] &= found
            if not exact[share]:
                break
    return bool(exact.all())


@part
def _eight_rows(x: Any, x_at: int, weight: Any, panel: int, size: int) -> Any:
    """Products of eight rows side by side with eight of the weight: a register for each of x."""
    codes, steps, lows, blocks = weight
    step, low = splat(np.float32(1)), splat(np.float32(0))
    r0 = r1 = r2 = r3 = r4 = r5 = r6 = r7 = splat(np.float32(0))
    code, scale = panel * size * LANES, panel * blocks * LANES
    for first in range(0, size * LANES, BLOCK * LANES):
        if blocks:
            step, low = load(steps, scale + first // BLOCK), load(lows, scale + first // BLOCK)
        for at in range(first, min(first + BLOCK * LANES, size * LANES), LANES):
            w = fma(load(codes, code + at), step, low)
            r0 = fma(w, spread(x, x_at + at), r0)
            r1 = fma(w, spread(x, x_at + at + 1), r1)
            r2 = fma(w, spread(x, x_at + at + 2), r2)
            r3 = fma(w, spread(x, x_at + at + 3), r3)
            r4 = fma(w, spread(x, x_at + at + 4), r4)
            r5 = fma(w, spread(x, x_at + at + 5), r5)
            r6 = fma(w, spread(x, x_at + at + 6), r6)
            r7 = fma(w, spread(x, x_at + at + 7), r7)
    return r0, r1, r2, r3, r4, r5, r6, r7


@part
def _one_row(x: Any, weight: Any, panels: Any, size: int) -> Any:
    """Products of one row with eight of the weight in each of four places: a register for each.

    Each sum is in the order of `_eight_rows`, so that a row gets the same alone.
    """
    codes, steps, lows, blocks = weight
    p0, p1, p2, p3 = panels
    length, scales = size * LANES, blocks * LANES
    one, zero = splat(np.float32(1)), splat(np.float32(0))
    r0 = r1 = r2 = r3 = low0 = low1 = low2 = low3 = zero
    step0 = step1 = step2 = step3 = one
    for first in range(0, size, BLOCK):
        if blocks:
            at = first // BLOCK * LANES
            step0, low0 = load(steps, p0 * scales + at), load(lows, p0 * scales + at)
            step1, low1 = load(steps, p1 * scales + at), load(lows, p1 * scales + at)
            step2, low2 = load(steps, p2 * scales + at), load(lows, p2 * scales + at)
            step3, low3 = load(steps, p3 * scales + at), load(lows, p3 * scales + at)
        for k in range(first, min(first + BLOCK, size)):
            value, at = spread(x, k), k * LANES
            r0 = fma(fma(load(codes, p0 * length + at), step0, low0), value, r0)
            r1 = fma(fma(load(codes, p1 * length + at), step1, low1), value, r1)
            r2 = fma(fma(load(codes, p2 * length + at), step2, low2), value, r2)
            r3 = fma(fma(load(codes, p3 * length + at), step3, low3), value, r3)
    return r0, r1, r2, r3


@part
def _one_row_share(x: Any, weight: Any, size: int, begin: int, end: int, out: Any) -> None:
    """Columns of the result from panels [begin, end) of the weight, for one row."""
    for p0 in range(begin, end, 4):
        p1, p2, p3 = min(p0 + 1, end - 1), min(p0 + 2, end - 1), min(p0 + 3, end - 1)
        r0, r1, r2, r3 = _one_row(x, weight, (p0, p1, p2, p3), size)
        store(out, p0 * LANES, r0)
        store(out, p1 * LANES, r1)
        store(out, p2 * LANES, r2)
        store(out, p3 * LANES, r3)


@part
def _side_by_side_rows(x: Any) -> Any:
    """[T, K] to [ceil(T / 8), K, 8] in one row of numbers, zeros for the rows missing."""
    rows, size = x.shape
    groups = np.zeros((rows + LANES - 1) // LANES * size * LANES, np.float32)
    for row in range(rows):
        to = row // LANES * size * LANES + row % LANES
        for k in range(size):
            put(groups, to + k * LANES, x[row, k])
    return groups


_PRODUCTS = "void(f4[:,::1], {}[:,:,::1], f4[:,:,::1], f4[:,:,::1], f4[:,::1], i8)"


@kernel([_PRODUCTS.format("u1"), _PRODUCTS.format("i2")], parallel=True)
def _products(x: Any, codes: Any, steps: Any, lows: Any, out: Any, num_parts: int) -> None:
    """out = x @ weight.T; for more than one row `out` has eighths of rows, the last ones unused."""
    (rows, size), count, columns = x.shape, len(codes), out.shape[1]
    weight = codes.reshape(-1), steps.reshape(-1), lows.reshape(-1), steps.shape[1]
    groups, numbers = x.reshape(-1) if rows == 1 else _side_by_side_rows(x), out.reshape(-1)
    for share in numba.prange(num_parts):
        begin, end = count * share // num_parts, count * (share + 1) // num_parts
        if rows == 1:
            _one_row_share(groups, weight, size, begin, end, numbers)
            continue
        for panel in range(begin, end):
            for group in range(len(out) // LANES):
                r0, r1, r2, r3, r4, r5, r6, r7 = _eight_rows(
                    groups, group * size * LANES, weight, panel, size
                )
                first = group * LANES * columns + panel * LANES
                store(numbers, first, r0)
                store(numbers, first + columns, r1)
                store(numbers, first + 2 * columns, r2)
                store(numbers, first + 3 * columns, r3)
                store(numbers, first + 4 * columns, r4)
                store(numbers, first + 5 * columns, r5)
                store(numbers, first + 6 * columns, r6)
                store(numbers, first + 7 * columns, r7)


def narrow_linear(x: Tensor, weight: NarrowWeight) -> Tensor:
    """`memd_kernels.narrow.narrow_linear`, without a bias."""
    rows = x.shape[0]
    filled = 1 if rows == 1 else -(-rows // LANES) * LANES
    out = np.empty((filled, len(weight.codes) * LANES), np.float32)
    _products(x.contiguous().numpy(), weight.codes, weight.steps, weight.lows, out, threads())
    return torch.from_numpy(out if rows == filled else out[:rows])
