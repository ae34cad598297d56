"""Programmatic dependent launch: a kernel comes up while the one before it ends.

Kernels of a decode step are short, and so is the pause between two of them beside that: programs
are set up, and their first loads asked for, before the last ones of the kernel before are done.
Needs compute capability 9.0; elsewhere, and after kernels of libraries, nothing changes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from memd_kernels import launch


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Behind this, what earlier kernels wrote is there, and what they read may be overwritten.

    Only then is the next kernel let in: so what it finds before its own wait is at least what there
    was before this one.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Ask for the cache lines of some pointers, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def overlapped(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch whose kernel calls `wait_for_previous`."""
    if launch.capability(device) >= (9, 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}
