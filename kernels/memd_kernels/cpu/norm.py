"""Root mean square norm of a few rows, in one pass over each."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from memd_kernels import reference
from memd_kernels.cpu.jit import MAX_ROWS, kernel
from memd_kernels.reference.norm import check_rms_norm


@kernel("void(f4[:,::1], f4[:,::1], f4[::1], f4, f4[:,::1], f4[:,::1])")
def _norms(x: Any, residual: Any, weight: Any, eps: Any, total: Any, out: Any) -> None:
    size = len(weight)
    for row in range(len(x)):
        squares = np.float32(0)
        if len(residual):
            for i in range(size):
                value = x[row, i] + residual[row, i]
                total[row, i] = value
                squares += value * value
        else:
            for i in range(size):
                squares += x[row, i] * x[row, i]
        scale = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
        summed = total[row] if len(residual) else x[row]
        for i in range(size):
            out[row, i] = summed[i] * scale * weight[i]


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`memd_kernels.reference.rms_norm`, in float32."""
    if x.ndim != 2 or len(x) > MAX_ROWS:
        return reference.rms_norm(x, weight, eps, residual)
    check_rms_norm(x, weight, residual)
    x, out = x.contiguous(), torch.empty(x.shape)
    if residual is None:
        none = out[:0].numpy()
        _norms(x.numpy(), none, weight.numpy(), eps, none, out.numpy())
        return out, x
    total = torch.empty(x.shape)
    _norms(
        x.numpy(), residual.contiguous().numpy(), weight.numpy(), eps, total.numpy(), out.numpy()
    )
    return out, total
