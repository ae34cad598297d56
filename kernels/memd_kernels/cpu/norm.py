"""Root mean square norm and gated activation, in one pass over each row."""

from typing import Any

import numba
import numpy as np
from torch import Tensor

from memd_kernels import reference
from memd_kernels.cpu.jit import kernel, part, parts_for
from memd_kernels.cpu.lanes import LANES, LOG2_E, exp2, fma, get, load, put, quotient, splat, store
from memd_kernels.cpu.memory import empty, numbers_of, tensor_of
from memd_kernels.reference.norm import check_gate_up, check_rms_norm

_NORMS = "void({0}[:,::1], {0}[:,::1], {0}[::1], f4, {0}[:,::1], {0}[:,::1], i8)"
_SILU_MUL = "void({0}[:,::1], {0}[:,::1], i8)"


@part
def _norm_row(
    x: Any, residual: Any, weight: Any, eps: Any, total: Any, out: Any, at: int, size: int
) -> None:
    """The row at x[at:], with its residual if there are some."""
    summed, squares = x, np.float32(0)
    if len(residual):
        summed = total
        for i in range(at, at + size):
            put(total, i, get(x, i) + get(residual, i))
    for i in range(at, at + size):
        squares += get(summed, i) * get(summed, i)
    scale = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
    for i in range(size):
        put(out, at + i, get(summed, at + i) * scale * get(weight, i))


@kernel([_NORMS.format("f4"), _NORMS.format("i2")], parallel=True)
def _norms(
    x: Any, residual: Any, weight: Any, eps: Any, total: Any, out: Any, num_parts: int
) -> None:
    (rows, size), numbers, added = x.shape, x.reshape(-1), residual.reshape(-1)
    totals, results = total.reshape(-1), out.reshape(-1)
    for share in numba.prange(num_parts):
        for row in range(rows * share // num_parts, rows * (share + 1) // num_parts):
            _norm_row(numbers, added, weight, eps, totals, results, row * size, size)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`memd_kernels.reference.rms_norm`, computed in float32."""
    if x.ndim != 2:
        return reference.rms_norm(x, weight, eps, residual)
    check_rms_norm(x, weight, residual)
    rows, out = numbers_of(x.contiguous()), empty(x.shape, x.dtype)
    if residual is None:
        _norms(rows, rows[:0], numbers_of(weight), eps, rows, out, parts_for(x))
        return tensor_of(out), x
    total = empty(x.shape, x.dtype)
    added = numbers_of(residual.contiguous())
    _norms(rows, added, numbers_of(weight), eps, total, out, parts_for(x))
    return tensor_of(out), tensor_of(total)


@part
def _silu_mul_row(gate_up: Any, at: int, out: Any, to: int, size: int) -> None:
    """out[to:] = silu(gate_up[at:]) * gate_up[at + size:]."""
    zero, one, by_e = splat(np.float32(0)), splat(np.float32(1)), splat(np.float32(-LOG2_E))
    for i in range(0, size, LANES):
        gate, up = load(gate_up, at + i), load(gate_up, at + size + i)
        divisor = fma(exp2(fma(gate, by_e, zero)), one, one)
        store(out, to + i, quotient(fma(gate, up, zero), divisor))


@kernel([_SILU_MUL.format("f4"), _SILU_MUL.format("i2")], parallel=True)
def _silu_mul(gate_up: Any, out: Any, num_parts: int) -> None:
    (rows, size), read, written = out.shape, gate_up.reshape(-1), out.reshape(-1)
    for share in numba.prange(num_parts):
        for row in range(rows * share // num_parts, rows * (share + 1) // num_parts):
            _silu_mul_row(read, 2 * row * size, written, row * size, size)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`memd_kernels.reference.silu_mul`, computed in float32."""
    check_gate_up(gate_up)
    if gate_up.shape[1] % (2 * LANES):
        return reference.silu_mul(gate_up)
    out = empty((gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
    _silu_mul(numbers_of(gate_up.contiguous()), out, parts_for(gate_up))
    return tensor_of(out)
