"""Root mean square norm and gated activation of a few rows, in one pass over each."""

from typing import Any

import numpy as np
from torch import Tensor

from memd_kernels import reference
from memd_kernels.cpu.jit import kernel, worth_it
from memd_kernels.cpu.lanes import LANES, LOG2_E, exp2, fma, get, load, put, quotient, splat, store
from memd_kernels.cpu.memory import empty, numbers_of, tensor_of
from memd_kernels.reference.norm import check_gate_up, check_rms_norm

_NORMS = "void({0}[:,::1], {0}[:,::1], {0}[::1], f4, {0}[:,::1], {0}[:,::1])"
_SILU_MUL = "void({0}[:,::1], {0}[:,::1])"


@kernel([_NORMS.format("f4"), _NORMS.format("i2")])
def _norms(x: Any, residual: Any, weight: Any, eps: Any, total: Any, out: Any) -> None:
    size = len(weight)
    for row in range(len(x)):
        summed, squares = x[row], np.float32(0)
        if len(residual):
            summed = total[row]
            for i in range(size):
                put(summed, i, get(x[row], i) + get(residual[row], i))
        for i in range(size):
            squares += get(summed, i) * get(summed, i)
        scale = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
        for i in range(size):
            put(out[row], i, get(summed, i) * scale * get(weight, i))


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`memd_kernels.reference.rms_norm`, computed in float32."""
    if x.ndim != 2 or not worth_it(x):
        return reference.rms_norm(x, weight, eps, residual)
    check_rms_norm(x, weight, residual)
    rows, out = numbers_of(x.contiguous()), empty(x.shape, x.dtype)
    if residual is None:
        _norms(rows, rows[:0], numbers_of(weight), eps, rows, out)
        return tensor_of(out), x
    total = empty(x.shape, x.dtype)
    _norms(rows, numbers_of(residual.contiguous()), numbers_of(weight), eps, total, out)
    return tensor_of(out), tensor_of(total)


@kernel([_SILU_MUL.format("f4"), _SILU_MUL.format("i2")])
def _silu_mul(gate_up: Any, out: Any) -> None:
    size = out.shape[1]
    read, written = gate_up.reshape(-1), out.reshape(-1)
    zero, one, by_e = splat(np.float32(0)), splat(np.float32(1)), splat(np.float32(-LOG2_E))
    for row in range(len(out)):
        for i in range(0, size, LANES):
            gate, up = load(read, 2 * row * size + i), load(read, (2 * row + 1) * size + i)
            divisor = fma(exp2(fma(gate, by_e, zero)), one, one)
            store(written, row * size + i, quotient(fma(gate, up, zero), divisor))


def silu_mul(gate_up: Tensor) -> Tensor:
    """`memd_kernels.reference.silu_mul`, computed in float32."""
    check_gate_up(gate_up)
    if gate_up.shape[1] % (2 * LANES) or not worth_it(gate_up):
        return reference.silu_mul(gate_up)
    out = empty((gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
    _silu_mul(numbers_of(gate_up.contiguous()), out)
    return tensor_of(out)
