"""Copies of pages between device memory and host memory."""

from torch import Tensor


def check_host_pages(
    source: Tensor,
    target: Tensor,
    source_offsets: Tensor,
    target_offsets: Tensor,
    page_bytes: int,
) -> None:
    """Refuse arguments that `copy_host_pages` cannot take; see there."""
    if any(memory.element_size() != 1 or memory.stride() != (1,) for memory in (source, target)):
        raise ValueError("source and target must be contiguous, of one dimension and in bytes")
    if source_offsets.ndim != 1 or source_offsets.shape != target_offsets.shape:
        raise ValueError(
            f"offsets have shapes {tuple(source_offsets.shape)} and {tuple(target_offsets.shape)}, "
            "must be [n] both"
        )
    if page_bytes <= 0 or page_bytes % 16:
        raise ValueError(f"page_bytes is {page_bytes}, must be a multiple of 16")


def copy_host_pages(
    source: Tensor,
    target: Tensor,
    source_offsets: Tensor,
    target_offsets: Tensor,
    page_bytes: int,
) -> None:
    """Copy pages from one memory to another, one of which may be the host's.

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
    starts = zip(source_offsets.tolist(), target_offsets.tolist(), strict=True)
    for source_start, target_start in starts:
        page = source[source_start : source_start + page_bytes]
        target[target_start : target_start + page_bytes] = page
