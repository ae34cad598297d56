"""Products of a few rows with a weight matrix."""

import torch.nn.functional as F
from torch import Tensor


def few_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, for the few rows of a decode step.

    Shapes:
        x: [T, K].
        weight: [N, K], the dtype of `x`.
        bias: [N], the dtype of `x`.

    Returns:
        [T, N], the dtype of `x`; sums are in float32 on CUDA.

    Raises:
        ValueError: a shape or dtype does not match the above.
    """
    check_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError where the arguments of `few_row_linear` do not fit."""
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}, x {tuple(x.shape)} {x.dtype}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise ValueError(f"bias is {tuple(bias.shape)} {bias.dtype}, weight {tuple(weight.shape)}")
