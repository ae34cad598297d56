"""Rotary positions and the write of new keys and values, for a few rows."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from memd_kernels import reference
from memd_kernels.cpu.jit import kernel, part, worth_it
from memd_kernels.cpu.lanes import get, put
from memd_kernels.cpu.memory import flat_memory, numbers_of, page_offset, place_of
from memd_kernels.reference.rope import check_rope


@part
def _turn(head: Any, weight: Any, eps: Any, cos: Any, sin: Any, out: Any, at: int) -> None:
    """Normalise a head where there is a weight, and rotate it, into `out` from a position on."""
    size, half, scale = len(head), len(cos), np.float32(1)
    if len(weight):
        squares = np.float32(0)
        for i in range(size):
            squares += get(head, i) * get(head, i)
        scale = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
    for i in range(half):
        first, second = get(head, i) * scale, get(head, half + i) * scale
        if len(weight):
            first, second = first * get(weight, i), second * get(weight, half + i)
        put(out, at + i, first * cos[i] - second * sin[i])
        put(out, at + half + i, second * cos[i] + first * sin[i])
    for i in range(2 * half, size):
        value = get(head, i) * scale
        put(out, at + i, value * get(weight, i) if len(weight) else value)


_ROTATE = (
    "b1({0}[:,:,:], {0}[:,:,:], {0}[:,:,:], f4[:,::1], f4[:,::1], {0}[::1], UniTuple(i8, 5), i8,"
    " i8[:], i8[:], {0}[::1], {0}[::1], f4, {0}[:,:,::1])"
)


@kernel([_ROTATE.format("f4"), _ROTATE.format("i2")])
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
) -> bool:
    """Returns whether all pages and offsets exist; else nothing is done."""
    rows, heads, size = k.shape
    for row in range(rows):
        if not (-1 <= pages[row] < place[0] and 0 <= offsets[row] < page_tokens):
            return False
    for row in range(rows):
        for head in range(q.shape[1]):
            _turn(q[row, head], q_norm, eps, cos[row], sin[row], out[row, head], 0)
        if pages[row] < 0:
            continue
        for head in range(heads):
            at = page_offset(place, pages[row]) + (head * page_tokens + offsets[row]) * size
            _turn(k[row, head], k_norm, eps, cos[row], sin[row], memory, at)
            at += heads * page_tokens * size
            memory[at : at + size] = v[row, head]
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
    if not worth_it(q):
        return reference.rope_and_store(
            q, k, v, cos, sin, kv, layer, write_pages, write_offsets, q_norm, k_norm, eps
        )
    check_rope(q, k, v, cos, sin, kv, layer, write_pages, write_offsets, q_norm, k_norm)
    none = q.new_empty(0)
    out = torch.empty(q.shape, dtype=q.dtype)
    done = _rotate_and_store(
        numbers_of(q),
        numbers_of(k),
        numbers_of(v),
        cos.contiguous().numpy(),
        sin.contiguous().numpy(),
        flat_memory(kv),
        place_of(kv, layer),
        kv.shape[5],
        write_pages.long().numpy(),
        write_offsets.long().numpy(),
        numbers_of(none if q_norm is None else q_norm),
        numbers_of(none if k_norm is None else k_norm),
        eps,
        numbers_of(out),
    )
    if not done:
        raise ValueError(f"write_pages {write_pages.tolist()}, {write_offsets.tolist()} not in kv")
    return out
