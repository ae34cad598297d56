"""Root mean square norm with the residual's sum, and the gated activation of the MLP."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memd_kernels import launch
from memd_kernels.compile import CompileCase
from memd_kernels.reference.norm import check_gate_up, check_rms_norm
from memd_kernels.triton.overlap import overlapped, wait_for_previous


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    weight = tl.load(weight_ptr + columns, inside, 0.0)
    wait_for_previous(OVERLAP)
    x = tl.load(x_ptr + row * x_stride + columns, inside, 0.0)  # [BLOCK]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, inside, 0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * size + columns, x, inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / size + eps)
    # Rounded before the weight, as Llama does.
    normed = (wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(normed_ptr + row * size + columns, normed.to(x.dtype), inside)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    stride,
    size,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a row
    OVERLAP: tl.constexpr,
):
    """One program for one block of columns of one row; neighbours have one row's."""
    wait_for_previous(OVERLAP)
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    columns = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up_ptr + row * stride + columns, inside, 0.0)  # [BLOCK]
    up = tl.load(gate_up_ptr + row * stride + size + columns, inside, 0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = active.to(tl.float32) * up.to(tl.float32)  # rounded twice, as the reference is
    tl.store(out_ptr + row * size + columns, product.to(gate.dtype), inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `memd_kernels.reference.rms_norm`; the last axis of each tensor must be contiguous.

    Raises:
        ValueError: a shape or dtype does not fit.

    Notes:
        Where the mean is computed in another order than the reference's, results may differ by one
        rounding of the dtype.
    """
    check_rms_norm(x, weight, residual)
    size = x.shape[-1]
    rows = x.reshape(-1, size)  # a view unless the leading axes cannot be joined
    added = rows if residual is None else residual.reshape(-1, size)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    if not rows.numel():
        return normed, total
    found = launch.config(
        "rms_norm", launch.capability(x.device), size=size, rows=launch.bucket(len(rows))
    )
    _rms_norm_kernel[(len(rows),)](
        rows,
        added,
        weight,
        normed,
        total,
        rows.stride(0),
        added.stride(0),
        size,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=triton.next_power_of_2(size),
        num_warps=found.num_warps,
        **overlapped(x.device),
    )
    return normed, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `memd_kernels.reference.silu_mul`; the last axis must be contiguous.

    Raises:
        ValueError: the last axis is odd.
    """
    check_gate_up(gate_up)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if not out.numel():
        return out
    found = launch.config(
        "silu_mul", launch.capability(gate_up.device), size=size, rows=launch.bucket(rows)
    )
    blocks = triton.cdiv(size, found.block_n)
    _silu_mul_kernel[(rows * blocks,)](
        gate_up,
        out,
        gate_up.stride(0),
        size,
        BLOCK=found.block_n,
        BLOCKS=blocks,
        num_warps=found.num_warps,
        **overlapped(gate_up.device),
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Both kernels at the sizes of a small and a large model."""
    norm = {
        **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr"), "*bf16:16"),
        **dict.fromkeys(("normed_ptr", "total_ptr"), "*bf16:16"),
        **dict.fromkeys(("x_stride", "residual_stride", "size"), "i32:16"),
        "eps": "fp32",
    }
    gated = {"gate_up_ptr": "*bf16:16", "out_ptr": "*bf16:16", "stride": "i32:16", "size": "i32:16"}
    return [
        *(
            CompileCase(
                _rms_norm_kernel,
                norm,
                {"HAS_RESIDUAL": True, "BLOCK": block},
                num_warps=warps,
            )
            for block, warps in ((1024, 4), (8192, 8))
        ),
        CompileCase(_silu_mul_kernel, gated, {"BLOCK": 2048, "BLOCKS": 7}),
    ]
