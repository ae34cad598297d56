"""Kernels for float32 and bfloat16 on a CPU, compiled by numba.

Products and attention are for the few rows of a decode step, all else for any number of rows.
"""

from memd_kernels.cpu.decode import decode_attention, plan_decode, shared_prefix_attention
from memd_kernels.cpu.linear import few_row_linear
from memd_kernels.cpu.narrow import narrow_linear, narrow_weight
from memd_kernels.cpu.norm import rms_norm, silu_mul
from memd_kernels.cpu.rope import rope_and_store

__all__ = [
    "decode_attention",
    "few_row_linear",
    "narrow_linear",
    "narrow_weight",
    "plan_decode",
    "rms_norm",
    "rope_and_store",
    "shared_prefix_attention",
    "silu_mul",
]
