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

LINE_BYTES = tl.constexpr(128)  # of the second cache


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr, LET_IN: tl.constexpr = True):
    """Behind this, what earlier kernels wrote is there, and what they read may be overwritten.

    Only then is the next kernel let in, here or, without LET_IN, by `let_next_in`: so what it finds
    before its own wait is at least what there was before this one.
    """
    if OVERLAP:
        gdc_wait()
        if LET_IN:
            gdc_launch_dependents()


@triton.jit
def let_next_in(OVERLAP: tl.constexpr):
    """Programs of the next kernel may come up, as soon as all of this one's are here or done."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def take_room(never, ROOM: tl.constexpr):
    """Take ROOM bytes of shared memory, so that fewer programs fit on a multiprocessor.

    `never`: false, which the compiler does not know.
    """
    if ROOM > 0:
        tl.inline_asm_elementwise(
            f"""{{
            .reg .pred used;
            .shared .align 16 .b8 room[{ROOM}];
            setp.ne.s32 used, $1, 0;
            @used st.shared.u32 [room], $1;
            mov.u32 $0, 0;
            }}""",
            "=r,r",
            [never.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch_run(first, SIZE: tl.constexpr):
    """Ask for the cache lines of SIZE elements in a row."""
    ELEMENTS: tl.constexpr = LINE_BYTES * 8 // first.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((SIZE + ELEMENTS - 1) // ELEMENTS)
    at = tl.arange(0, LINES) * ELEMENTS
    prefetch(first + tl.where(at < SIZE, at, 0))


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
