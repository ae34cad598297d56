"""Products of a few rows with a weight matrix: every weight is read once, for all rows."""

import os
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from memd_kernels.cpu.jit import MAX_ROWS, kernel, part, threads
from memd_kernels.cpu.lanes import LANES, fma, get, load, put, splat, store, sums
from memd_kernels.cpu.memory import numbers_of
from memd_kernels.reference.linear import check_linear

ONEDNN = torch.backends.mkldnn.is_available()
# What it compiles for one number of rows takes most of a megabyte, and it keeps a thousand of them,
# as does ideep between it and torch. Both read this when they are first used.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "32")


@part
def _one_by_eight(x: Any, weight: Any, at: int, size: int) -> Any:
    """Products of a row of x with the row of the weight at `at` and the seven after it."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = splat(np.float32(0))
    for k in range(0, size, LANES):
        value, w = load(x, k), at + k
        s0 = fma(load(weight, w), value, s0)
        s1 = fma(load(weight, w + size), value, s1)
        s2 = fma(load(weight, w + 2 * size), value, s2)
        s3 = fma(load(weight, w + 3 * size), value, s3)
        s4 = fma(load(weight, w + 4 * size), value, s4)
        s5 = fma(load(weight, w + 5 * size), value, s5)
        s6 = fma(load(weight, w + 6 * size), value, s6)
        s7 = fma(load(weight, w + 7 * size), value, s7)
    return sums((s0, s1, s2, s3, s4, s5, s6, s7))


@part
def _eight_by_one(x: Any, weight: Any, at: int, size: int) -> Any:
    """Products of eight rows of x with the row of the weight at `at`, each as in company."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = splat(np.float32(0))
    for k in range(0, size, LANES):
        w = load(weight, at + k)
        s0 = fma(w, load(x, k), s0)
        s1 = fma(w, load(x, k + size), s1)
        s2 = fma(w, load(x, k + 2 * size), s2)
        s3 = fma(w, load(x, k + 3 * size), s3)
        s4 = fma(w, load(x, k + 4 * size), s4)
        s5 = fma(w, load(x, k + 5 * size), s5)
        s6 = fma(w, load(x, k + 6 * size), s6)
        s7 = fma(w, load(x, k + 7 * size), s7)
    return sums((s0, s1, s2, s3, s4, s5, s6, s7))


@part
def _eight_by_eight(x: Any, weight: Any, at: int, size: int, tile: Any) -> None:
    """tile[column, row] = products of eight rows with eight of the weight."""
    for column in range(LANES):
        store(tile, column * LANES, _eight_by_one(x, weight, at + column * size, size))


_PRODUCTS = "void(f4[:,::1], {0}[:,::1], {0}[:,::1], i8, i8)"


@kernel([_PRODUCTS.format("f4"), _PRODUCTS.format("i2")], parallel=True)
def _products(x: Any, weight: Any, out: Any, rows: int, num_parts: int) -> None:
    """out[:rows] = x @ weight.T; x is one row, or has rows up to the next eighth."""
    (count, size), numbers, results = weight.shape, weight.reshape(-1), out.reshape(-1)
    panels = count // LANES
    for share in numba.prange(num_parts):
        tile = np.empty(LANES * LANES, np.float32)
        for panel in range(panels * share // num_parts, panels * (share + 1) // num_parts):
            column = panel * LANES
            if rows == 1:
                store(results, column, _one_by_eight(x[0], numbers, column * size, size))
                continue
            for first in range(0, rows, LANES):
                group = x[first : first + LANES].reshape(-1)
                _eight_by_eight(group, numbers, column * size, size, tile)
                for row in range(min(LANES, rows - first)):
                    for i in range(LANES):
                        at = (first + row) * count + column + i
                        put(results, at, get(tile, i * LANES + row))


def few_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`memd_kernels.reference.few_row_linear`, with sums in float32."""
    check_linear(x, weight, bias)
    rows, (count, size) = len(x), weight.shape
    if 0 < rows <= MAX_ROWS and count % LANES == 0 and size % LANES == 0:
        padded = torch.zeros(1 if rows == 1 else -(-rows // LANES) * LANES, size)
        padded[:rows] = x
        out = torch.empty(rows, count, dtype=x.dtype)
        _products(padded.numpy(), numbers_of(weight.contiguous()), numbers_of(out), rows, threads())
        return out if bias is None else out.add_(bias)
    if x.dtype == torch.float32 and ONEDNN:
        # MKL, which F.linear takes, needs up to a third more time. torch has no public name for it.
        products: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return products
    return F.linear(x, weight, bias)
