"""The arithmetic of memd over paged KV memory: attention, rotary positions, norms, sampling.

Depends on torch, triton and numba alone and knows nothing of memd. Each function here takes the
Triton kernel where its first argument, a tensor or packed pages, is on a CUDA device; on a CPU, for
float32 and bfloat16, what is compiled in `cpu`, where that is faster; else the same function in
plain torch. All have one signature, told in `reference`, which is also what the kernels are tested
against. Only `narrow_linear` is for a CPU alone.
"""

import functools
import importlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from memd_kernels import reference
from memd_kernels.formats import PACKED_PAGE, PackedFormat, PackedPages, view_packed
from memd_kernels.launch import batch_invariant, set_batch_invariant
from memd_kernels.narrow import NARROW_ROWS, NarrowWeight, narrow_linear, narrow_weight
from memd_kernels.reference import flash as _flash
from memd_kernels.reference import host_pages as _host_pages
from memd_kernels.sinks import Sinks

_COMPILED = (torch.float32, torch.bfloat16)  # dtypes of `cpu`

P = ParamSpec("P")
R = TypeVar("R")


def _by_device(
    plain: Callable[P, R], module: str, on_cpu: bool = False, invariant: bool = False
) -> Callable[P, R]:
    """The function of the same name for where its tensors are; imported with its first call.

    Args:
        plain: In plain torch.
        module: Of `triton`, for CUDA tensors.
        on_cpu: Whether `cpu` has it.
        invariant: Whether `triton.invariant` has it; see `set_batch_invariant`.
    """

    @functools.cache
    def compiled(package: str) -> Callable[P, R]:
        found = importlib.import_module(f"memd_kernels.{package}")
        function: Callable[P, R] = getattr(found, plain.__name__)
        return function

    @functools.wraps(plain)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first, second = args[0], args[1] if len(args) > 1 else args[0]
        if getattr(first, "is_cuda", False):
            found = "invariant" if invariant and batch_invariant() else module
            return compiled(f"triton.{found}")(*args, **kwargs)
        # The second tensor: lengths, the first argument of a plan, are integers.
        if on_cpu and getattr(second, "dtype", None) in _COMPILED:
            return compiled("cpu")(*args, **kwargs)
        return plain(*args, **kwargs)

    return call


copy_host_pages = _by_device(_host_pages.copy_host_pages, "host_pages")
decode_attention = _by_device(reference.decode_attention, "decode", on_cpu=True, invariant=True)
few_row_linear = _by_device(reference.few_row_linear, "linear", on_cpu=True, invariant=True)
flash_attention = _by_device(_flash.flash_attention, "flash")
move_packed_pages = _by_device(reference.move_packed_pages, "packed_pages")
move_pages = _by_device(reference.move_pages, "pages")
pack_pages = _by_device(reference.pack_pages, "packed_pages")
plan_decode = _by_device(reference.plan_decode, "plan", on_cpu=True, invariant=True)
prefill_attention = _by_device(reference.prefill_attention, "prefill", invariant=True)
rms_norm = _by_device(reference.rms_norm, "norm", on_cpu=True)
rope_and_store = _by_device(reference.rope_and_store, "rope", on_cpu=True)
rotate_queries = _by_device(reference.rotate_queries, "rope")
sample = _by_device(reference.sample, "sample")
shared_prefix_attention = _by_device(
    reference.shared_prefix_attention, "shared_prefix", on_cpu=True, invariant=True
)
silu_mul = _by_device(reference.silu_mul, "norm", on_cpu=True)
unpack_pages = _by_device(reference.unpack_pages, "packed_pages")
token_logprobs = reference.token_logprobs

__all__ = [
    "NARROW_ROWS",
    "PACKED_PAGE",
    "NarrowWeight",
    "PackedFormat",
    "PackedPages",
    "Sinks",
    "batch_invariant",
    "copy_host_pages",
    "decode_attention",
    "few_row_linear",
    "flash_attention",
    "move_packed_pages",
    "move_pages",
    "narrow_linear",
    "narrow_weight",
    "pack_pages",
    "plan_decode",
    "prefill_attention",
    "reference",
    "rms_norm",
    "rope_and_store",
    "rotate_queries",
    "sample",
    "set_batch_invariant",
    "shared_prefix_attention",
    "silu_mul",
    "token_logprobs",
    "unpack_pages",
    "view_packed",
]
