"""Rotary positions and the write of new keys and values."""

from typing import Any

import numba
import numpy as np
from torch import Tensor

from memd_kernels.cpu.jit import kernel, part, parts_for
from memd_kernels.cpu.lanes import get, put
from memd_kernels.cpu.memory import empty, numbers_of, page_offset, place_of, tensor_of
from memd_kernels.reference.rope import check_rope


@part
def _turn(
    head: Any, at: int, size: int, weight: Any, eps: Any, angles: Any, out: Any, to: int
) -> None:
    """Normalise the head at head[at] where there is a weight, and rotate it, to out[to] and on.

    `angles`: cosines, sines, where those of the head begin, and how many there are.
    """
    cos, sin, angle, half = angles
    scale = np.float32(1)
    if len(weight):
        squares = np.float32(0)
        for i in range(size):
            squares += get(head, at + i) * get(head, at + i)
        scale = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
    for i in range(half):
        first, second = get(head, at + i) * scale, get(head, at + half + i) * scale
        if len(weight):
            first, second = first * get(weight, i), second * get(weight, half + i)
        c, s = get(cos, angle + i), get(sin, angle + i)
        put(out, to + i, first * c - second * s)
        put(out, to + half + i, second * c + first * s)
    for i in range(2 * half, size):
        value = get(head, at + i) * scale
        put(out, to + i, value * get(weight, i) if len(weight) else value)


def _heads(rows: Tensor) -> Any:
    """[T, heads, size] as the kernel takes it: the numbers of a head side by side."""
    return numbers_of(rows if rows.stride(2) == 1 else rows.contiguous())


@part
def _strides(rows: Any) -> Any:
    """How many numbers rows and heads of [rows, heads, size] are apart."""
    return rows.strides[0] // rows.itemsize, rows.strides[1] // rows.itemsize


_ROTATE = (
    "b1({0}[:,:,:], {0}[:,:,:], {0}[:,:,:], f4[:,::1], f4[:,::1], {0}[:,:,:,:,:,:,:],"
    " UniTuple(i8, 5), i8, i8[:], i8[:], {0}[::1], {0}[::1], f4, {0}[:,:,::1], i8)"
)


@kernel([_ROTATE.format("f4"), _ROTATE.format("i2")], parallel=True)
def _rotate_and_store(
    q: Any,
    k: Any,
    v: Any,
    cos: Any,
    sin: Any,
    memory: Any,
    place: Any,
    page_tokens: Any,
    pages: Any,
    offsets: Any,
    q_norm: Any,
    k_norm: Any,
    eps: Any,
    out: Any,
    num_parts: Any,
) -> bool:
    """Returns whether all pages and offsets exist; else nothing is done."""
    rows, heads, size = k.shape
    for row in range(rows):
        if not (-1 <= pages[row] < place[0] and 0 <= offsets[row] < page_tokens):
            return False
    q_heads, half = q.shape[1], cos.shape[1]
    (q_row, q_head), (k_row, k_head), (v_row, v_head) = _strides(q), _strides(k), _strides(v)
    for share in numba.prange(num_parts):
        for row in range(rows * share // num_parts, rows * (share + 1) // num_parts):
            angles = (cos, sin, row * half, half)
            for head in range(q_heads):
                at, to = row * q_row + head * q_head, (row * q_heads + head) * size
                _turn(q, at, size, q_norm, eps, angles, out, to)
            if pages[row] < 0:
                continue
            for head in range(heads):
                to = page_offset(place, pages[row]) + (head * page_tokens + offsets[row]) * size
                _turn(k, row * k_row + head * k_head, size, k_norm, eps, angles, memory, to)
                at, to = row * v_row + head * v_head, to + heads * page_tokens * size
                for i in range(size):
                    put(memory, to + i, get(v, at + i))
    return True


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
    """`memd_kernels.reference.rope_and_store`, computed in float32."""
    check_rope(q, k, v, cos, sin, kv, layer, write_pages, write_offsets, q_norm, k_norm)
    out = empty(q.shape, q.dtype)
    none = out.reshape(-1)[:0]
    done = _rotate_and_store(
        _heads(q),
        _heads(k),
        _heads(v),
        cos.contiguous().numpy(),
        sin.contiguous().numpy(),
        numbers_of(kv),
        place_of(kv, layer),
        kv.shape[5],
        write_pages.long().numpy(),
        write_offsets.long().numpy(),
        none if q_norm is None else numbers_of(q_norm),
        none if k_norm is None else numbers_of(k_norm),
        eps,
        out,
        parts_for(q),
    )
    if not done:
        raise ValueError(f"write_pages {write_pages.tolist()}, {write_offsets.tolist()} not in kv")
    return tensor_of(out)
