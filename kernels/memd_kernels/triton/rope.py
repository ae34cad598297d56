"""Norm and rotation of queries and keys, and the write of keys and values into their pages."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memd_kernels import launch
from memd_kernels.compile import CompileCase
from memd_kernels.reference.rope import check_angles, check_norm, check_rope
from memd_kernels.triton.overlap import overlapped, wait_for_previous


@triton.jit
def _load_heads(
    heads_ptr,  # of the program's token and first head
    head_stride,
    weight_ptr,
    inside,
    part,
    part_inside,
    rest,
    rest_inside,
    eps,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Both halves of the rotated part and the rest of some heads, normed, in float32."""
    dtype: tl.constexpr = heads_ptr.dtype.element_ty
    part_mask = inside[:, None] & part_inside[None, :]
    rest_mask = inside[:, None] & rest_inside[None, :]
    starts = heads_ptr + tl.arange(0, inside.shape[0])[:, None] * head_stride
    first = tl.load(starts + part[None, :], part_mask, 0.0).to(tl.float32)
    second = tl.load(starts + HALF + part[None, :], part_mask, 0.0).to(tl.float32)
    other = tl.load(starts + rest[None, :], rest_mask, 0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(other * other, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weight = tl.load(weight_ptr + part, part_inside, 0.0).to(tl.float32)[None, :]
        first = ((first * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        weight = tl.load(weight_ptr + HALF + part, part_inside, 0.0).to(tl.float32)[None, :]
        second = ((second * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        weight = tl.load(weight_ptr + rest, rest_inside, 0.0).to(tl.float32)[None, :]
        other = ((other * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    return first, second, other


@triton.jit
def _rope_and_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    out_ptr,
    kv_ptr,
    pages_ptr,
    offsets_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    block_stride,
    page_stride,
    layer_offset,  # not in the pointer: memory behind the first page may not be there
    num_heads,
    num_kv_heads,
    eps,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for HEADS heads of one token: of the queries, or of keys and values."""
    row = tl.program_id(0).to(tl.int64)
    query_programs = tl.cdiv(num_heads, HEADS)
    is_query = tl.program_id(1) < query_programs
    head = tl.arange(0, HEADS)
    part = tl.arange(0, HALF_BLOCK)
    part_inside = part < HALF
    rest = 2 * HALF + tl.arange(0, REST_BLOCK)
    rest_inside = rest < HEAD_DIM
    wait_for_previous(OVERLAP)
    cos = tl.load(cos_ptr + row * HALF + part, part_inside, 0.0)[None, :]
    sin = tl.load(sin_ptr + row * HALF + part, part_inside, 0.0)[None, :]
    if is_query:
        start = tl.program_id(1) * HEADS
        inside = start + head < num_heads
        source = q_ptr + row * q_stride + start.to(tl.int64) * q_head_stride
        first, second, other = _load_heads(
            source, q_head_stride, q_norm_ptr, inside, part, part_inside, rest, rest_inside,
            eps, HALF, HEAD_DIM, HAS_NORM,
        )  # fmt: skip
        target = out_ptr + (row * num_heads + start) * HEAD_DIM + head[:, None] * HEAD_DIM
    else:
        start = (tl.program_id(1) - query_programs) * HEADS
        inside = start + head < num_kv_heads
        source = k_ptr + row * k_stride + start.to(tl.int64) * k_head_stride
        first, second, other = _load_heads(
            source, k_head_stride, k_norm_ptr, inside, part, part_inside, rest, rest_inside,
            eps, HALF, HEAD_DIM, HAS_NORM,
        )  # fmt: skip
        page = tl.load(pages_ptr + row).to(tl.int64)
        inside = start + head < tl.where(page >= 0, num_kv_heads, 0)
        slot = (page // PAGES_PER_BLOCK) * block_stride + (page % PAGES_PER_BLOCK) * page_stride
        slot += layer_offset + tl.load(offsets_ptr + row).to(tl.int64) * HEAD_DIM
        target = kv_ptr + slot + (start + head[:, None]) * (PAGE_TOKENS * HEAD_DIM)
        column = tl.arange(0, WIDTH)[None, :]
        mask = inside[:, None] & (column < HEAD_DIM)
        source = v_ptr + row * v_stride + start.to(tl.int64) * v_head_stride
        value = tl.load(source + head[:, None] * v_head_stride + column, mask, 0.0)
        tl.store(target + num_kv_heads * (PAGE_TOKENS * HEAD_DIM) + column, value, mask)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    mask = inside[:, None] & part_inside[None, :]
    tl.store(target + part[None, :], (first * cos - second * sin).to(dtype), mask)
    tl.store(target + HALF + part[None, :], (second * cos + first * sin).to(dtype), mask)
    tl.store(target + rest[None, :], other.to(dtype), inside[:, None] & rest_inside[None, :])


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
    """As `memd_kernels.reference.rope_and_store`, in one launch.

    The last axis of q, k and v must be contiguous; they may be views of one tensor. Pages that are
    neither -1 nor within `kv` are not noticed.

    Raises:
        ValueError: a shape or dtype does not fit. Nothing is written.
    """
    check_rope(q, k, v, cos, sin, kv, layer, write_pages, write_offsets, q_norm, k_norm)
    rows, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    num_kv_heads, half = k.shape[1], cos.shape[1]
    found = launch.config(
        "rope_and_store",
        launch.capability(q.device),
        head_dim=head_dim,
        rows=launch.bucket(rows),
    )
    heads = found.block_m
    grid = rows, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads)
    _rope_and_store_kernel[grid](
        q,
        k,
        v,
        cos.contiguous(),
        sin.contiguous(),
        q if q_norm is None else q_norm,
        k if k_norm is None else k_norm,
        out,
        kv,
        write_pages,
        write_offsets,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *kv.stride()[:2],
        layer * kv.stride(2),
        num_heads,
        num_kv_heads,
        eps,
        PAGES_PER_BLOCK=kv.shape[1],
        PAGE_TOKENS=kv.shape[5],
        HEAD_DIM=head_dim,
        HALF=half,
        HAS_NORM=q_norm is not None,
        HEADS=heads,
        HALF_BLOCK=triton.next_power_of_2(max(half, 1)),
        REST_BLOCK=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        WIDTH=triton.next_power_of_2(head_dim),
        num_warps=found.num_warps,
        **overlapped(q.device),
    )
    return out


def rotate_queries(
    q: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """As `memd_kernels.reference.rotate_queries`: the same kernel, of which no program has keys.

    The last axis of q must be contiguous.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    check_angles(q, cos, sin)
    check_norm("q_norm", q_norm, q)
    rows, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    half = cos.shape[1]
    capability, size = launch.capability(q.device), launch.bucket(rows)
    found = launch.config("rope_and_store", capability, head_dim=head_dim, rows=size)
    none = torch.empty(0, dtype=torch.int32, device=q.device)
    weight = q if q_norm is None else q_norm
    _rope_and_store_kernel[rows, triton.cdiv(num_heads, found.block_m)](
        *(q, q, q, cos.contiguous(), sin.contiguous(), weight, weight, out, q, none, none),
        *q.stride()[:2] * 4,
        0,
        num_heads,
        0,
        eps,
        PAGES_PER_BLOCK=1,
        PAGE_TOKENS=1,
        HEAD_DIM=head_dim,
        HALF=half,
        HAS_NORM=q_norm is not None,
        HEADS=found.block_m,
        HALF_BLOCK=triton.next_power_of_2(max(half, 1)),
        REST_BLOCK=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        WIDTH=triton.next_power_of_2(head_dim),
        num_warps=found.num_warps,
        **overlapped(q.device),
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Small heads without norms, and large ones that are partly rotated with norms."""
    types = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16:16"),
        **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32:16"),
        **dict.fromkeys(("q_norm_ptr", "k_norm_ptr", "out_ptr", "kv_ptr"), "*bf16:16"),
        **dict.fromkeys(("pages_ptr", "offsets_ptr"), "*i64:16"),
        **dict.fromkeys(("q_stride", "q_head_stride", "k_stride", "k_head_stride"), "i32:16"),
        **dict.fromkeys(("v_stride", "v_head_stride"), "i32:16"),
        "block_stride": "i64:16",
        "page_stride": "i64:16",
        "layer_offset": "i64:16",
        "num_heads": "i32",
        "num_kv_heads": "i32",
        "eps": "fp32",
    }
    page = ("PAGES_PER_BLOCK", "PAGE_TOKENS", "HEAD_DIM", "HALF", "HAS_NORM")
    names = (*page, "HEADS", "HALF_BLOCK", "REST_BLOCK", "WIDTH")
    return [
        CompileCase(_rope_and_store_kernel, types, dict(zip(names, values, strict=True)))
        for values in (
            (45, 16, 64, 32, False, 4, 32, 1, 64),
            (8, 16, 128, 64, True, 4, 64, 1, 128),
            (8, 64, 256, 64, True, 8, 64, 128, 256),
        )
    ]
