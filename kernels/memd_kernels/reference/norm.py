"""Root mean square norm and the gated activation of the MLP."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scale rows to unit root mean square, after adding a residual if there is one.

    Statistics are in float32; the weight is applied in the dtype of `x`, as Llama does.

    Shapes:
        x: [..., size].
        weight: [size], the dtype of `x`.
        residual: as `x`.

    Returns:
        The norm of `x + residual`, and `x + residual` (`x` itself without a residual).

    Raises:
        ValueError: a shape or dtype does not match the above.

    Source:
        Zhang and Sennrich, arXiv 1910.07467.
    """
    if x.shape[-1:] != weight.shape or x.dtype != weight.dtype:
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}, x {tuple(x.shape)} {x.dtype}"
        )
    if residual is not None:
        if residual.shape != x.shape:
            raise ValueError(f"residual is {tuple(residual.shape)}, x {tuple(x.shape)}")
        x = residual + x
    return F.rms_norm(x, weight.shape, None, eps) * weight, x


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of gate and up side by side.

    Shapes:
        gate_up: [T, 2 * size]. Returns [T, size].

    Raises:
        ValueError: the last axis is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[-1]} columns, an odd number")
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
