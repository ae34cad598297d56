"""Float32 weights in fewer bytes, without a number changed, for products that reading limits."""

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NARROW_ROWS = 24  # with more, what the arithmetic costs is more than what is saved in reading


@dataclass(frozen=True)
class NarrowWeight:
    """A float32 weight of [N, K]: steps * codes + lows, or bfloat16's numbers.

    Eight of its rows lie side by side, one for each lane of a vector register.

    Attributes:
        codes: [N / 8, K, 8], uint8; or int16, which are the bits of bfloat16.
        steps: [N / 8, K / 32, 8] float32, one for 32 codes of a row; [N / 8, 0, 8] for bfloat16.
        lows: As `steps`: the least number of the 32.
    """

    codes: NDArray[np.uint8] | NDArray[np.int16]
    steps: NDArray[np.float32]
    lows: NDArray[np.float32]

    def wide(self) -> Tensor:
        """[N, K], float32."""
        codes = torch.from_numpy(self.codes)
        if codes.dtype == torch.int16:
            side_by_side = (codes.int() << 16).view(torch.float32)
        else:
            block = self.codes.shape[1] // self.steps.shape[1]
            steps, lows = (
                torch.from_numpy(part).double().repeat_interleave(block, dim=1)
                for part in (self.steps, self.lows)
            )
            side_by_side = (codes * steps + lows).float()
        return side_by_side.transpose(1, 2).flatten(0, 1)


def narrow_weight(weight: Tensor) -> NarrowWeight | None:
    """The same weight as `narrow_linear` takes it, where it has such a form.

    Shapes:
        weight: [N, K].

    Returns:
        None unless the weight is float32 on a CPU, N can be divided by 8, and either all numbers
        are bfloat16's, or K can be divided by 32 and each 32 in a row are at most 256 evenly spaced
        numbers, as in files with 4, 5 or 8 bits.
    """
    if weight.is_cuda or weight.dtype != torch.float32:
        return None
    found: NarrowWeight | None = _cpu().narrow_weight(weight.contiguous())
    return found


def narrow_linear(x: Tensor, weight: NarrowWeight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, on a CPU.

    Shapes:
        x: [T, K], float32; up to `NARROW_ROWS` rows it is quicker than `few_row_linear`. What a row
            gets depends on no other row.
        bias: [N], float32.

    Returns:
        [T, N], float32.

    Raises:
        ValueError: a shape or dtype does not match the above.
    """
    panels, size, lanes = weight.codes.shape
    count = panels * lanes
    if x.ndim != 2 or x.shape[1] != size or x.dtype != torch.float32:
        raise ValueError(f"weight is {(count, size)} torch.float32, x {tuple(x.shape)} {x.dtype}")
    if bias is not None and (bias.shape != (count,) or bias.dtype != torch.float32):
        raise ValueError(f"bias is {tuple(bias.shape)} {bias.dtype}, weight {(count, size)}")
    out: Tensor = _cpu().narrow_linear(x, weight)
    return out if bias is None else out.add_(bias)


@functools.cache
def _cpu() -> Any:
    """Imported with the first call: the compiler takes time to load."""
    return importlib.import_module("memd_kernels.cpu")
