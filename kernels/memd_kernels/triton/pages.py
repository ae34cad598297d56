"""Copies of pages within the KV memory: copy on write, and moves that empty blocks."""

import triton
import triton.language as tl
from torch import Tensor

from memd_kernels import launch
from memd_kernels.compile import CompileCase
from memd_kernels.reference.pages import check_moves


@triton.jit(do_not_specialize_on_alignment=["sources_ptr", "targets_ptr", "counts_ptr"])
def _move_pages_kernel(
    kv_ptr,
    sources_ptr,
    targets_ptr,
    counts_ptr,
    move_stride,
    block_stride,
    page_stride,
    page_size,  # elements of a page
    PAGES_PER_BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for one piece of one page."""
    move = tl.program_id(1) * move_stride
    source = tl.load(sources_ptr + move).to(tl.int64)
    target = tl.load(targets_ptr + move).to(tl.int64)
    if source >= 0:
        element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = element < page_size
        if not WHOLE:
            count = tl.load(counts_ptr + move)
            inside = inside & (element // HEAD_DIM % PAGE_TOKENS < count)
        start = source // PAGES_PER_BLOCK * block_stride + source % PAGES_PER_BLOCK * page_stride
        values = tl.load(kv_ptr + start + element, inside)
        start = target // PAGES_PER_BLOCK * block_stride + target % PAGES_PER_BLOCK * page_stride
        tl.store(kv_ptr + start + element, values, inside)


def move_pages(kv: Tensor, sources: Tensor, targets: Tensor, counts: Tensor | None = None) -> None:
    """As `memd_kernels.reference.move_pages`, in one launch.

    Pages out of range, and pages that are written and in another copy, are not noticed.

    Raises:
        ValueError: a shape or dtype does not fit. Nothing is copied.
    """
    check_moves(kv, sources, targets, counts)
    move_memory(kv, sources, targets, counts)


def move_memory(
    memory: Tensor, sources: Tensor, targets: Tensor, counts: Tensor | None = None
) -> None:
    """`move_pages` without its checks, of pages of any kind.

    Shapes:
        memory: [num_blocks, pages_per_block, ...], the rest contiguous; where there are counts, its
            last axes are those of `kv`.
    """
    if not len(sources):
        return
    lengths = sources if counts is None else counts
    if not sources.stride() == targets.stride() == lengths.stride():
        sources, targets, lengths = (part.contiguous() for part in (sources, targets, lengths))
    found = launch.config("move_pages", launch.capability(memory.device))
    page_size = memory[0, 0].numel()
    _move_pages_kernel[(triton.cdiv(page_size, found.block_n), len(sources))](
        memory,
        sources,
        targets,
        lengths,
        sources.stride(0),
        memory.stride(0),
        memory.stride(1),
        page_size,
        PAGES_PER_BLOCK=memory.shape[1],
        PAGE_TOKENS=memory.shape[-2],
        HEAD_DIM=memory.shape[-1],
        WHOLE=counts is None,
        BLOCK=found.block_n,
        num_warps=found.num_warps,
    )


def compile_cases() -> list[CompileCase]:
    """Whole pages, and leading tokens of them."""
    types = {
        "kv_ptr": "*bf16:16",
        **dict.fromkeys(("sources_ptr", "targets_ptr", "counts_ptr"), "*i32:16"),
        "move_stride": "i32",
        "block_stride": "i64:16",
        "page_stride": "i64:16",
        "page_size": "i32:16",
    }
    sizes = {"PAGES_PER_BLOCK": 8, "PAGE_TOKENS": 16, "HEAD_DIM": 128}
    return [
        CompileCase(_move_pages_kernel, types, {**sizes, "WHOLE": whole, "BLOCK": 4096})
        for whole in (True, False)
    ]
