"""Products of a few rows with a weight matrix: every weight is read once, for all rows."""

from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from memd_kernels.cpu.jit import MAX_ROWS, kernel, part, threads
from memd_kernels.reference.linear import check_linear

# With more rows what MKL gains from columns is lost by what has to be turned before and after, but
# not where the result is wide, as the MLP's, and used element by element.
COLUMN_ROWS = 64
WIDE = 4  # times as many columns of the result as of `x`


@part
def dot_8(w: Any, x: Any, first: int, out: Any, column: int) -> None:
    """out[first + i, column] = w · x[first + i], i < 8: as many sums as there are registers for."""
    x0, x1, x2, x3 = x[first], x[first + 1], x[first + 2], x[first + 3]
    x4, x5, x6, x7 = x[first + 4], x[first + 5], x[first + 6], x[first + 7]
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    for k in range(len(w)):
        s0 += w[k] * x0[k]
        s1 += w[k] * x1[k]
        s2 += w[k] * x2[k]
        s3 += w[k] * x3[k]
        s4 += w[k] * x4[k]
        s5 += w[k] * x5[k]
        s6 += w[k] * x6[k]
        s7 += w[k] * x7[k]
    out[first, column], out[first + 1, column] = s0, s1
    out[first + 2, column], out[first + 3, column] = s2, s3
    out[first + 4, column], out[first + 5, column] = s4, s5
    out[first + 6, column], out[first + 7, column] = s6, s7


@part
def dot_4(w: Any, x: Any, first: int, out: Any, column: int) -> None:
    """As `dot_8` for four rows."""
    x0, x1, x2, x3 = x[first], x[first + 1], x[first + 2], x[first + 3]
    s0 = s1 = s2 = s3 = np.float32(0)
    for k in range(len(w)):
        s0 += w[k] * x0[k]
        s1 += w[k] * x1[k]
        s2 += w[k] * x2[k]
        s3 += w[k] * x3[k]
    out[first, column], out[first + 1, column] = s0, s1
    out[first + 2, column], out[first + 3, column] = s2, s3


@part
def dot_1(w: Any, x: Any, first: int, out: Any, column: int) -> None:
    """As `dot_8` for one row."""
    row = x[first]
    total = np.float32(0)
    for k in range(len(w)):
        total += w[k] * row[k]
    out[first, column] = total


@part
def dots(w: Any, x: Any, out: Any, column: int) -> None:
    """out[:, column] = x @ w."""
    rows = len(x)
    for first in range(0, rows - 7, 8):
        dot_8(w, x, first, out, column)
    done = rows // 8 * 8
    if rows - done >= 4:
        dot_4(w, x, done, out, column)
        done += 4
    for first in range(done, rows):
        dot_1(w, x, first, out, column)


@kernel("void(f4[:,::1], f4[:,::1], f4[:,::1], i8)", parallel=True)
def _products(x: Any, weight: Any, out: Any, num_parts: int) -> None:
    columns = len(weight)
    for share in numba.prange(num_parts):
        for column in range(columns * share // num_parts, columns * (share + 1) // num_parts):
            dots(weight[column], x, out, column)


def few_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`memd_kernels.reference.few_row_linear`, in float32."""
    check_linear(x, weight, bias)
    if len(x) > COLUMN_ROWS and len(weight) < WIDE * weight.shape[1]:
        return F.linear(x, weight, bias)
    if len(x) > MAX_ROWS:
        # MKL is up to twice as fast with the weights on the left, if the columns are contiguous.
        columns = x.contiguous().t()
        if bias is None:
            return torch.mm(weight, columns).t()
        return torch.addmm(bias[:, None], weight, columns).t()
    out = torch.empty(len(x), len(weight))
    _products(x.contiguous().numpy(), weight.contiguous().numpy(), out.numpy(), threads())
    return out if bias is None else out.add_(bias)
