"""The arithmetic of memd over paged KV memory: attention, rotary positions, norms, sampling.

Depends on torch and triton alone and knows nothing of memd. Each function here takes the Triton
kernel where its first argument, a tensor or packed pages, is on a CUDA device, else the same
function in plain torch; both have one signature, told in `reference`, which is also what the
kernels are tested against.
"""

import functools
import importlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from memd_kernels import reference
from memd_kernels.formats import PACKED_PAGE, PackedFormat, PackedPages, view_packed
from memd_kernels.reference import flash as _flash
from memd_kernels.reference import host_pages as _host_pages

P = ParamSpec("P")
R = TypeVar("R")


def _by_device(plain: Callable[P, R], module: str) -> Callable[P, R]:
    """The Triton launcher of the same name for CUDA tensors; imported with its first call."""
    launcher: list[Callable[P, R]] = []

    @functools.wraps(plain)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not getattr(args[0], "is_cuda", False):
            return plain(*args, **kwargs)
        if not launcher:
            found = importlib.import_module(f"memd_kernels.triton.{module}")
            launcher.append(getattr(found, plain.__name__))
        return launcher[0](*args, **kwargs)

    return call


copy_host_pages = _by_device(_host_pages.copy_host_pages, "host_pages")
decode_attention = _by_device(reference.decode_attention, "decode")
few_row_linear = _by_device(reference.few_row_linear, "linear")
flash_attention = _by_device(_flash.flash_attention, "flash")
move_packed_pages = _by_device(reference.move_packed_pages, "packed_pages")
move_pages = _by_device(reference.move_pages, "pages")
pack_pages = _by_device(reference.pack_pages, "packed_pages")
plan_decode = _by_device(reference.plan_decode, "plan")
prefill_attention = _by_device(reference.prefill_attention, "prefill")
rms_norm = _by_device(reference.rms_norm, "norm")
rope_and_store = _by_device(reference.rope_and_store, "rope")
sample = _by_device(reference.sample, "sample")
shared_prefix_attention = _by_device(reference.shared_prefix_attention, "shared_prefix")
silu_mul = _by_device(reference.silu_mul, "norm")
unpack_pages = _by_device(reference.unpack_pages, "packed_pages")
token_logprobs = reference.token_logprobs

__all__ = [
    "PACKED_PAGE",
    "PackedFormat",
    "PackedPages",
    "copy_host_pages",
    "decode_attention",
    "few_row_linear",
    "flash_attention",
    "move_packed_pages",
    "move_pages",
    "pack_pages",
    "plan_decode",
    "prefill_attention",
    "reference",
    "rms_norm",
    "rope_and_store",
    "sample",
    "shared_prefix_attention",
    "silu_mul",
    "token_logprobs",
    "unpack_pages",
    "view_packed",
]
