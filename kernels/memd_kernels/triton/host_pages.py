"""Many pages between the device and pinned host memory in one launch.

Single copies of small pages are bound by the time to enqueue them: 2-4 GB/s for 64 KiB, 9-17 for
256 KiB, of a link that carries 51-55. The device reads and writes pinned host memory itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memd_kernels.compile import CompileCase
from memd_kernels.reference.host_pages import check_host_pages

# Of the link, not of the card, so not in the launch tables. Its bandwidth times its latency is some
# 110 KB: so much must be in flight, and more programs would only take multiprocessors from the
# forward pass beside it.
NUM_PROGRAMS = 16
_NUM_WARPS = 8
_BLOCK = 2048  # int64 words, 16 KiB a program: four loads of 16 bytes in flight per thread


@triton.jit(do_not_specialize=["num_pages"])
def _copy_pages(
    source,
    target,
    source_offsets,
    target_offsets,
    num_pages,
    page_words,
    BLOCK: tl.constexpr,
):
    pieces = tl.cdiv(page_words, BLOCK)
    for item in range(tl.program_id(0), num_pages * pieces, tl.num_programs(0)):
        page = item // pieces
        words = (item % pieces) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK], within the page
        # Counted in words of 8 bytes; pages begin at multiples of 16 bytes, so accesses are whole.
        read = tl.multiple_of(tl.load(source_offsets + page) // 8, 2)
        write = tl.multiple_of(tl.load(target_offsets + page) // 8, 2)
        inside = words < page_words
        # Nothing here is read twice: leave the cache to the forward pass.
        values = tl.load(source + read + words, mask=inside, eviction_policy="evict_first")
        tl.store(target + write + words, values, mask=inside, eviction_policy="evict_first")


def copy_host_pages(
    source: Tensor,
    target: Tensor,
    source_offsets: Tensor,
    target_offsets: Tensor,
    page_bytes: int,
) -> None:
    """Copy pages from one memory to another, one of which may be the host's.

    The launch is on the current stream of the offsets' device, and takes few multiprocessors.

    Shapes:
        source: [source_bytes], uint8; on the device, or pinned host memory.
        target: [target_bytes], uint8, the same; changed in place. Target pages must not overlap
            each other or source pages.
        source_offsets, target_offsets: [n], int64, on the device: where each page begins, in bytes,
            multiples of 16.
        page_bytes: Size of every page, a multiple of 16.

    Raises:
        ValueError: a shape or size does not match the above. Nothing is copied.
    """
    check_host_pages(source, target, source_offsets, target_offsets, page_bytes)
    num_pages = len(source_offsets)
    if not num_pages:
        return
    page_words = page_bytes // 8
    _copy_pages[(min(NUM_PROGRAMS, num_pages * triton.cdiv(page_words, _BLOCK)),)](
        _words(source),
        _words(target),
        source_offsets,
        target_offsets,
        num_pages,
        page_words,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )


def _words(memory: Tensor) -> Tensor:
    """The same memory as int64, as far as it is whole words."""
    return memory[: memory.numel() // 8 * 8].view(torch.int64)


def compile_cases() -> list[CompileCase]:
    """The one specialisation that the copier launches."""
    signature = {
        "source": "*i64:16",
        "target": "*i64:16",
        "source_offsets": "*i64:16",
        "target_offsets": "*i64:16",
        "num_pages": "i32",
        "page_words": "i32:16",
    }
    return [CompileCase(_copy_pages, signature, {"BLOCK": _BLOCK}, _NUM_WARPS)]
