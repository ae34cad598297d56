"""Rotary positions, and the write of new keys and values into their pages."""

import torch
from torch import Tensor

from memd_kernels.reference.norm import rms_norm
from memd_kernels.reference.pages import check_kv, layer_pages, page_rows


def rope_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    layer: int,
    write_pages: Tensor,
    write_offsets: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate queries and keys to their positions and write keys and values into the pages.

    Dimension i of the first half of the rotated part turns with dimension i of its second half;
    dimensions past the rotated part stay as they are. The rotation is computed in float32. Where a
    model has norms of queries and keys, they come first.

    Shapes:
        q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim]; all of the dtype of `kv`.
        cos, sin: [T, rope_dim / 2], float32.
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim],
            changed in place.
        write_pages, write_offsets: [T], int32 or int64; page and token within it of each row. A row
            whose page is -1 is not written.
        q_norm, k_norm: [head_dim], the dtype of `q`; both or neither. Weights of the norm over each
            head, as `rms_norm` with `eps`.

    Returns:
        Rotated q, [T, num_heads, head_dim], contiguous or not.

    Raises:
        ValueError: a shape, dtype or device does not match the above. Nothing is written.

    Source:
        Su et al., arXiv 2104.09864, with the halves paired as in GPT-NeoX.
    """
    check_rope(q, k, v, cos, sin, kv, layer, write_pages, write_offsets, q_norm, k_norm)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps)[0], rms_norm(k, k_norm, eps)[0]
    heads = torch.cat((q, k, v), 1)
    _turn(heads[:, : q.shape[1] + k.shape[1]], cos, sin)
    stored = heads[:, q.shape[1] :].unflatten(1, (2, -1))
    if len(write_pages) and write_pages.min() < 0:
        written = write_pages >= 0
        stored, write_pages, write_offsets = (
            rows[written] for rows in (stored, write_pages, write_offsets)
        )
    # [rows, page_tokens, 2, num_kv_heads, head_dim]
    tokens = layer_pages(kv, layer).permute(0, 3, 1, 2, 4)
    tokens[page_rows(kv, write_pages), write_offsets] = stored
    return heads[:, : q.shape[1]]


def rotate_queries(
    q: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Queries rotated as `rope_and_store` does it, to other positions: for attention sinks.

    Shapes:
        q: [T, num_heads, head_dim], not rotated, not changed.
        cos, sin: [T, rope_dim / 2], float32.
        q_norm: [head_dim], the dtype of `q`; None: the model has no norm of queries.

    Returns:
        [T, num_heads, head_dim].

    Raises:
        ValueError: a shape or dtype does not match the above.
    """
    check_angles(q, cos, sin)
    check_norm("q_norm", q_norm, q)
    turned = q.clone() if q_norm is None else rms_norm(q, q_norm, eps)[0]
    _turn(turned, cos, sin)
    return turned


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads [T, heads, head_dim] in place."""
    half = cos.shape[1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    turned_first = torch.addcmul(first * cos, second, sin, value=-1)
    second.copy_(torch.addcmul(second * cos, first, sin))
    first.copy_(turned_first)


def check_rope(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    layer: int,
    write_pages: Tensor,
    write_offsets: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
) -> None:
    """Raise ValueError where the arguments of `rope_and_store` do not fit."""
    check_kv(kv, layer, q)
    rows = q.shape[:1]
    if k.shape != (*rows, kv.shape[4], kv.shape[6]) or v.shape != k.shape:
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)} do not fit q {tuple(q.shape)} and kv"
        )
    if k.dtype != kv.dtype or v.dtype != kv.dtype:
        raise ValueError(f"k is {k.dtype}, v {v.dtype}, kv {kv.dtype}")
    check_angles(q, cos, sin)
    for name, index in (("write_pages", write_pages), ("write_offsets", write_offsets)):
        if index.shape != rows or index.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} is {tuple(index.shape)} {index.dtype}, not integers of {list(rows)}"
            )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("one of q_norm and k_norm is missing")
    check_norm("q_norm", q_norm, q)
    check_norm("k_norm", k_norm, q)


def check_angles(q: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError where angles do not fit queries."""
    if q.ndim != 3 or cos.ndim != 2 or cos.shape != sin.shape or cos.shape[:1] != q.shape[:1]:
        raise ValueError(
            f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} do not fit q {tuple(q.shape)}"
        )
    if 2 * cos.shape[1] > q.shape[2] or cos.dtype != torch.float32 or sin.dtype != cos.dtype:
        raise ValueError(
            f"cos is {tuple(cos.shape)} {cos.dtype}, sin {sin.dtype}; a head has {q.shape[2]}"
        )


def check_norm(name: str, weight: Tensor | None, q: Tensor) -> None:
    """Raise ValueError where the weights of a norm do not fit queries."""
    if weight is not None and (weight.shape != q.shape[2:] or weight.dtype != q.dtype):
        raise ValueError(f"{name} is {tuple(weight.shape)} {weight.dtype}, q {q.dtype}")
