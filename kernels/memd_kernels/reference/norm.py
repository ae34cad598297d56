"""Root mean square norm and the gated activation of the MLP."""

import torch
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
    check_rms_norm(x, weight, residual)
    if residual is not None:
        x = residual + x
    wide = x if x.dtype == torch.float64 else x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(norm.new_full((), eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight), x


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of gate and up side by side.

    Shapes:
        gate_up: [T, 2 * size]. Returns [T, size].

    Raises:
        ValueError: the last axis is odd.
    """
    check_gate_up(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def check_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    """Raise ValueError where the arguments of `rms_norm` do not fit."""
    if x.shape[-1:] != weight.shape or x.dtype != weight.dtype:
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}, x {tuple(x.shape)} {x.dtype}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual is {tuple(residual.shape)} {residual.dtype}, x {tuple(x.shape)} {x.dtype}"
        )


def check_gate_up(gate_up: Tensor) -> None:
    """Raise ValueError where the argument of `silu_mul` does not fit."""
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(
            f"gate_up has {gate_up.shape[-1]} columns, an odd number, or is not [T, 2 * size]"
        )
