"""Kernels for float32 on a CPU, compiled by numba: few rows, as a decode step has them."""

from memd_kernels.cpu.decode import decode_attention, plan_decode, shared_prefix_attention
from memd_kernels.cpu.linear import few_row_linear
from memd_kernels.cpu.norm import rms_norm
from memd_kernels.cpu.rope import rope_and_store

__all__ = [
    "decode_attention",
    "few_row_linear",
    "plan_decode",
    "rms_norm",
    "rope_and_store",
    "shared_prefix_attention",
]
