"""Addressing of pages inside the KV memory."""

import math

import torch
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
        pages: any shape, int32 or int64 page ids.

    Returns:
        The same shape, integers.
    """
    block_stride, page_stride = kv.stride()[:2]
    if block_stride == kv.shape[1] * page_stride:
        return pages
    row_stride = math.gcd(block_stride, page_stride)
    pages = pages.long()  # rows may be far narrower than pages: their numbers pass 2**31
    blocks = pages.div(kv.shape[1], rounding_mode="floor")
    return blocks * (block_stride // row_stride) + (pages - blocks * kv.shape[1]) * (
        page_stride // row_stride
    )


def move_pages(kv: Tensor, sources: Tensor, targets: Tensor, counts: Tensor | None = None) -> None:
    """Copy pages into other pages, all layers: whole, or the leading tokens of each.

    The copies are made in any order: a page that one of them writes may be in no other.

    Shapes:
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim],
            changed in place.
        sources, targets: [N], int32, page ids. Where the source is -1, nothing is copied.
        counts: [N], int32, tokens copied of each page, at most page_tokens; None: all.

    Raises:
        ValueError: a shape or dtype does not match the above; a page is out of range, a count
            exceeds a page or a page that is written is in another copy, which on CUDA is not
            noticed. Nothing is copied.
    """
    check_moves(kv, sources, targets, counts)
    page_tokens = kv.shape[5]
    num_pages = kv.shape[0] * kv.shape[1]
    lengths = [page_tokens] * len(sources) if counts is None else counts.tolist()
    moves = [
        (source, target, count)
        for source, target, count in zip(sources.tolist(), targets.tolist(), lengths, strict=True)
        if source != -1
    ]
    for source, target, count in moves:
        if min(source, target) < 0 or max(source, target) >= num_pages:
            raise ValueError(f"pages {source}, {target}: kv has {num_pages} pages")
        if not 0 <= count <= page_tokens:
            raise ValueError(f"count is {count}, a page holds {page_tokens} tokens")
    written = {target for _, target, _ in moves}
    if len(written) < len(moves) or any(source in written for source, _, _ in moves):
        raise ValueError("a page that is written is in more than one copy")
    for source, target, count in moves:
        kv[divmod(target, kv.shape[1])][..., :count, :] = kv[divmod(source, kv.shape[1])][
            ..., :count, :
        ]


def check_moves(kv: Tensor, sources: Tensor, targets: Tensor, counts: Tensor | None) -> None:
    """Raise ValueError where the shapes and dtypes of `move_pages` do not fit."""
    for name, values in (("sources", sources), ("targets", targets), ("counts", counts)):
        if values is not None and (
            values.dtype != torch.int32 or values.ndim != 1 or len(values) != len(sources)
        ):
            raise ValueError(
                f"{name} is {tuple(values.shape)} {values.dtype}, not int32 of [{len(sources)}]"
            )
    if kv.ndim != 7 or not kv[0, 0].is_contiguous():
        raise ValueError(f"kv of shape {tuple(kv.shape)} has pages that are not contiguous")
