"""Addressing of pages inside the KV memory."""

import math
from collections.abc import Sequence

from torch import Tensor


def check_kv(kv: Tensor, layer: int, heads: Tensor) -> None:
    """Refuse a KV memory that cannot hold the heads of a call.

    Shapes:
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim].
        heads: [T, num_heads, head_dim], queries or keys; num_heads a multiple of num_kv_heads.

    Raises:
        ValueError: a shape, dtype or device does not match the above, or `layer` is out of range.
    """
    if kv.ndim != 7 or kv.shape[3] != 2:
        raise ValueError(
            f"kv has shape {tuple(kv.shape)}, not [blocks, pages, layers, 2, heads, tokens, dim]"
        )
    if not 0 <= layer < kv.shape[2]:
        raise ValueError(f"layer is {layer}, kv has {kv.shape[2]} layers")
    if heads.ndim != 3 or heads.shape[2] != kv.shape[6] or heads.shape[1] % kv.shape[4]:
        raise ValueError(
            f"heads have shape {tuple(heads.shape)}, kv has {kv.shape[4]} heads of {kv.shape[6]}"
        )
    if heads.dtype != kv.dtype or heads.device != kv.device:
        raise ValueError(f"heads are {heads.dtype} on {heads.device}, kv {kv.dtype} on {kv.device}")


def layer_pages(kv: Tensor, layer: int) -> Tensor:
    """One layer of the KV memory with blocks and pages on a single axis, as a view.

    The axis advances by the greatest common divisor of the strides of a block and of a page: by a
    page where blocks have nothing left over, by less where they do. `page_rows` finds pages on it.

    Returns:
        [rows, 2, num_kv_heads, page_tokens, head_dim]. Rows overlap where blocks have a rest.
    """
    block_stride, page_stride, layer_stride, *strides = kv.stride()
    row_stride = math.gcd(block_stride, page_stride)
    last = (kv.shape[0] - 1) * block_stride + (kv.shape[1] - 1) * page_stride
    return kv.as_strided(
        (last // row_stride + 1, *kv.shape[3:]),
        (row_stride, *strides),
        kv.storage_offset() + layer * layer_stride,
    )


def page_rows(kv: Tensor, pages: Tensor) -> Tensor:
    """Where pages lie on the first axis of `layer_pages`.

    Shapes:
        pages: any shape, int64 page ids.

    Returns:
        The same shape, int64.
    """
    block_stride, page_stride = kv.stride()[:2]
    if block_stride == kv.shape[1] * page_stride:
        return pages
    row_stride = math.gcd(block_stride, page_stride)
    blocks = pages.div(kv.shape[1], rounding_mode="floor")
    return blocks * (block_stride // row_stride) + (pages - blocks * kv.shape[1]) * (
        page_stride // row_stride
    )


def copy_page_tokens(
    kv: Tensor, sources: Sequence[int], targets: Sequence[int], counts: Sequence[int]
) -> None:
    """Copy the leading tokens of pages into other pages, all layers, in order.

    Shapes:
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim],
            changed in place.
        sources, targets, counts: of one length; page ids, page ids, tokens.

    Raises:
        ValueError: lengths differ, a page is out of range, or a count exceeds a page. Nothing is
            copied.
    """
    num_blocks, pages_per_block, _, _, _, page_tokens, _ = kv.shape
    copies = list(zip(sources, targets, counts, strict=True))
    for source, target, count in copies:
        if min(source, target) < 0 or max(source, target) >= num_blocks * pages_per_block:
            raise ValueError(
                f"pages {source}, {target}: kv has {num_blocks * pages_per_block} pages"
            )
        if not 0 <= count <= page_tokens:
            raise ValueError(f"count is {count}, a page holds {page_tokens} tokens")
    for source, target, count in copies:
        kv[divmod(target, pages_per_block)][..., :count, :] = kv[divmod(source, pages_per_block)][
            ..., :count, :
        ]
