"""Packs pages, unpacks them and moves packed ones, all layers in one launch."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memd_kernels import launch
from memd_kernels.compile import CompileCase
from memd_kernels.formats import FormatName, PackedFormat, PackedPages
from memd_kernels.reference.packed import FP8_MAX, FP16_MAX, MAX_BASE, SCALES_TRIED, check_ids
from memd_kernels.triton.attend import padded
from memd_kernels.triton.pages import move_memory
from memd_kernels.triton.unpack import byte_of, check_device, load_channels, scale_of

_FP8_MAX = tl.constexpr(FP8_MAX)
_FP16_MAX = tl.constexpr(FP16_MAX)
_MAX_BASE = tl.constexpr(MAX_BASE)


@triton.jit
def _round(x):
    # Half to even, as torch does: adding this leaves no bits for a fraction.
    return x + 12582912.0 - 12582912.0


@triton.jit
def _quantise(x, wanted, BITS: tl.constexpr, AXIS: tl.constexpr, TRIED: tl.constexpr):
    """As `reference.packed.quantise` of groups along an axis; elements not wanted count nowhere.

    Returns:
        Codes, float32, of the shape of `x`; offsets, float16, and scale bytes, int32, of size 1
        along the axis; and what the codes stand for.
    """
    MOST: tl.constexpr = 2**BITS - 1
    BASE: tl.constexpr = 64 if BITS == 4 else 1024
    low = tl.min(tl.where(wanted, x, float("inf")), AXIS, keep_dims=True)
    high = tl.max(tl.where(wanted, x, -float("inf")), AXIS, keep_dims=True)
    count = tl.sum(wanted.to(tl.float32), AXIS, keep_dims=True)
    low = tl.where(count > 0, low, 0.0)
    high = tl.where(count > 0, high, 0.0)
    centre = low / 2 + high / 2
    reach = tl.minimum(tl.maximum(high / MOST - low / MOST, 0.0), _MAX_BASE / BASE)
    covering = (reach.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) + 127) >> 7
    best_offset = tl.zeros_like(centre).to(tl.float16)
    best_byte = tl.zeros_like(covering)
    least = tl.full(centre.shape, float("inf"), tl.float32)
    for step in tl.static_range(TRIED):
        byte = tl.maximum(covering - step, 0)
        scale = scale_of(byte).to(tl.float32)
        divisor = tl.where(scale > 0, scale, 1.0)
        codes = _clamp(_round((x - centre) / divisor + MOST / 2), MOST)
        mean = tl.sum(tl.where(wanted, x - scale * codes, 0.0), AXIS, keep_dims=True)
        mean = mean / tl.maximum(count, 1.0) - scale * BASE
        offset = tl.minimum(tl.maximum(mean, -_FP16_MAX), _FP16_MAX).to(tl.float16)
        minimum = offset.to(tl.float32) + scale * BASE
        codes = _clamp(_round((x - minimum) / divisor), MOST)
        lost = x - minimum - scale * codes
        error = tl.sum(tl.where(wanted, lost * lost, 0.0), AXIS, keep_dims=True)
        better = error < least
        best_offset = tl.where(better, offset, best_offset)
        best_byte = tl.where(better, byte, best_byte)
        least = tl.where(better, error, least)
    scale = scale_of(best_byte).to(tl.float32)  # not kept in the loop: fewer registers
    minimum = best_offset.to(tl.float32) + scale * BASE
    codes = _clamp(_round((x - minimum) / tl.where(scale > 0, scale, 1.0)), MOST)
    return codes, best_offset, best_byte, minimum + scale * codes


@triton.jit
def _clamp(codes, MOST: tl.constexpr):
    return tl.minimum(tl.maximum(codes, 0.0), MOST)


@triton.jit
def _pack_side(
    at,
    head,
    sums,
    group,
    CODES: tl.constexpr,
    OFFSETS: tl.constexpr,
    SCALES: tl.constexpr,
    KEYS: tl.constexpr,
    FORMAT: tl.constexpr,
    TRIED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Pack keys or values of one group of tokens; `at` points at them, `head` at where they go."""
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    token = tl.arange(0, TOKENS)
    index = tl.arange(0, 2 * HALF)  # halves of the channels, padded
    channel = index // HALF * HALF_DIM + index % HALF
    wanted = (token >= 0)[:, None] & (index % HALF < HALF_DIM)[None, :]
    read_at = at + token[:, None] * HEAD_DIM + channel[None, :]
    x = tl.load(read_at, mask=wanted, other=0.0).to(tl.float32)  # [TOKENS, 2 * HALF]
    first = group * TOKENS
    if FORMAT == "fp8":
        scale = (tl.max(tl.abs(x), 1, keep_dims=True) / _FP8_MAX).to(tl.float16)
        wide = scale.to(tl.float32)
        number = x / tl.where(wide > 0, wide, 1.0)
        number = tl.minimum(tl.maximum(number, -_FP8_MAX), _FP8_MAX).to(tl.float8e4nv)
        read = number.to(tl.float32) * wide
        scales = (head + SCALES).to(tl.pointer_type(tl.float16))
        tl.store(scales + first + token[:, None], scale)
        codes = number.to(tl.uint8, bitcast=True)
    else:
        BITS: tl.constexpr = 4 if FORMAT == "int4" else 8
        offsets = (head + OFFSETS).to(tl.pointer_type(tl.float16))
        scales = head + SCALES
        codes, offset, byte, read = _quantise(x, wanted, BITS, 0 if KEYS else 1, TRIED)
        if KEYS:
            side_at = group * HEAD_DIM + channel[None, :]
            known = (index % HALF < HALF_DIM)[None, :]
            tl.store(offsets + side_at, offset, mask=known)
            tl.store(scales + side_at, byte.to(tl.uint8), mask=known)
        else:
            tl.store(offsets + first + token[:, None], offset)
            tl.store(scales + first + token[:, None], byte.to(tl.uint8))
        codes = codes.to(tl.int32)
    if FORMAT == "int4":
        # Upper and lower halves of a byte are different bits: their sum is both.
        halves = tl.reshape(codes, (TOKENS, 2, HALF))
        shift = tl.arange(0, 2)[None, :, None] * 4
        column = tl.arange(0, HALF)
        code_at = head + CODES + (first + token)[:, None] * HALF_DIM
        code_at += byte_of(column, FORMAT, HALF)[None, :]
        both = tl.sum(halves << shift, 1).to(tl.uint8)
        tl.store(code_at, both, mask=(token >= 0)[:, None] & (column < HALF_DIM)[None, :])
    else:
        code_at = head + CODES + (first + token)[:, None] * HEAD_DIM + channel[None, :]
        tl.store(code_at, codes.to(tl.uint8), mask=wanted)
    lost = tl.where(wanted, x - read, 0.0)
    tl.store(sums, tl.sum(lost * lost))
    tl.store(sums + 1, tl.sum(x * x))


@triton.jit
def _pack_pages(
    kv,
    packed,
    sources,
    targets,
    sums,
    block_stride,
    page_stride,
    layer_stride,
    value_stride,
    packed_block,
    packed_page,
    packed_layer,
    PAGES_PER_BLOCK: tl.constexpr,
    PACKED_PER_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    FORMAT: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
    TRIED: tl.constexpr,
):
    """One program for one group of tokens of one head, layer and page."""
    group = tl.program_id(0)
    layer = tl.program_id(1) // KV_HEADS
    head = tl.program_id(1) % KV_HEADS
    source = tl.load(sources + tl.program_id(2)).to(tl.int64)
    target = tl.load(targets + tl.program_id(2)).to(tl.int64)
    if source < 0:
        return
    at = kv + source // PAGES_PER_BLOCK * block_stride + source % PAGES_PER_BLOCK * page_stride
    at += layer.to(tl.int64) * layer_stride
    at += (head * PAGE_TOKENS + group * GROUP_TOKENS) * HEAD_DIM
    into = packed + target // PACKED_PER_BLOCK * packed_block
    into += target % PACKED_PER_BLOCK * packed_page + layer.to(tl.int64) * packed_layer
    into += head * HEAD_BYTES
    program = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    sums += (program * tl.num_programs(0) + group).to(tl.int64) * 4
    GAP: tl.constexpr = PARTS[3] - PARTS[2] - PAGE_TOKENS // GROUP_TOKENS * HEAD_DIM
    if FORMAT != "fp8" and GAP > 0:  # equal pages are equal bytes
        tl.store(into + PARTS[3] - GAP + tl.arange(0, GAP), tl.zeros((GAP,), tl.uint8))
    _pack_side(
        at, into, sums, group, PARTS[0], PARTS[1], PARTS[2], True, FORMAT, TRIED,
        HEAD_DIM, HALF, GROUP_TOKENS,
    )  # fmt: skip
    _pack_side(
        at + value_stride, into, sums + 2, group, PARTS[3], PARTS[4], PARTS[5], False, FORMAT,
        TRIED, HEAD_DIM, HALF, GROUP_TOKENS,
    )  # fmt: skip


@triton.jit
def _unpack_pages(
    kv,
    packed,
    sources,
    targets,
    block_stride,
    page_stride,
    layer_stride,
    value_stride,
    packed_block,
    packed_page,
    packed_layer,
    PAGES_PER_BLOCK: tl.constexpr,
    PACKED_PER_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    FORMAT: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program for one group of tokens of one head, layer and page."""
    group = tl.program_id(0)
    layer = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    head = tl.program_id(1) % KV_HEADS
    source = tl.load(sources + tl.program_id(2)).to(tl.int64)
    target = tl.load(targets + tl.program_id(2)).to(tl.int64)
    if source < 0:
        return
    out = packed + source // PACKED_PER_BLOCK * packed_block
    out += source % PACKED_PER_BLOCK * packed_page + layer * packed_layer + head * HEAD_BYTES
    at = kv + target // PAGES_PER_BLOCK * block_stride + target % PAGES_PER_BLOCK * page_stride
    at += layer * layer_stride + head * (PAGE_TOKENS * HEAD_DIM)
    token = group * GROUP_TOKENS + tl.arange(0, GROUP_TOKENS)
    column = tl.arange(0, DIM)[None, :]
    at += token[:, None] * HEAD_DIM + column
    wanted = (token >= 0)[:, None] & (column < HEAD_DIM)
    keys = load_channels(
        out, token, token >= 0, PARTS[0], PARTS[1], PARTS[2], True, FORMAT, GROUP_TOKENS,
        HEAD_DIM, DIM,
    )  # fmt: skip
    tl.store(at, keys.to(kv.dtype.element_ty), mask=wanted)
    values = load_channels(
        out, token, token >= 0, PARTS[3], PARTS[4], PARTS[5], False, FORMAT, GROUP_TOKENS,
        HEAD_DIM, DIM,
    )  # fmt: skip
    tl.store(at + value_stride, values.to(kv.dtype.element_ty), mask=wanted)


def pack_pages(kv: Tensor, packed: PackedPages, sources: Tensor, targets: Tensor) -> Tensor:
    """As `memd_kernels.reference.pack_pages`, in one launch.

    Pages out of range and targets named twice are not noticed.

    Raises:
        ValueError: a shape, dtype or device does not fit, or the device has no instructions for the
            format. Nothing is written.
    """
    sources, targets = _check(kv, packed, sources, targets)
    format = packed.format
    layers, heads = packed.memory.shape[2:4]
    groups = format.page_tokens // format.group_tokens
    sums = torch.zeros((len(sources), layers, heads, groups, 2, 2), device=kv.device)
    if len(sources):
        found = launch.config("pack_pages", launch.capability(kv.device))
        _pack_pages[(groups, layers * heads, len(sources))](
            kv,
            packed.memory,
            sources,
            targets,
            sums,
            *kv.stride()[:4],
            *packed.memory.stride()[:3],
            HALF=launch.bucket(format.head_dim // 2),
            TRIED=SCALES_TRIED.get(format.name, 0),
            num_warps=found.num_warps,
            **_constants(kv.shape[1], packed),
        )
    lost, squares = sums.sum(3).unbind(-1)
    return (lost / torch.where(squares > 0, squares, 1.0)).sqrt().nan_to_num(nan=torch.inf)


def unpack_pages(packed: PackedPages, kv: Tensor, sources: Tensor, targets: Tensor) -> None:
    """As `memd_kernels.reference.unpack_pages`, in one launch.

    Pages out of range and targets named twice are not noticed.

    Raises:
        ValueError: a shape, dtype or device does not fit, or the device has no instructions for the
            format. Nothing is written.
    """
    sources, targets = _check(kv, packed, sources, targets)
    if not len(sources):
        return
    format = packed.format
    layers, heads = packed.memory.shape[2:4]
    found = launch.config("pack_pages", launch.capability(kv.device))
    groups = format.page_tokens // format.group_tokens
    _unpack_pages[(groups, layers * heads, len(sources))](
        kv,
        packed.memory,
        sources,
        targets,
        *kv.stride()[:4],
        *packed.memory.stride()[:3],
        DIM=padded(format.head_dim),
        num_warps=found.num_warps,
        **_constants(kv.shape[1], packed),
    )


def move_packed_pages(packed: PackedPages, sources: Tensor, targets: Tensor) -> None:
    """As `memd_kernels.reference.move_packed_pages`, in one launch.

    Pages out of range, and pages that are written and in another copy, are not noticed.

    Raises:
        ValueError: a shape or dtype does not fit. Nothing is copied.
    """
    check_ids(sources, targets)
    move_memory(packed.memory.view(torch.int32), sources, targets)


def _check(
    kv: Tensor, packed: PackedPages, sources: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Raise ValueError where arguments do not fit; page ids without gaps between them."""
    check_ids(sources, targets)
    packed.check(kv)
    check_device(packed)
    heads, tokens, dim = kv.shape[4:]
    if kv.stride()[3:] != (heads * tokens * dim, tokens * dim, dim, 1):
        raise ValueError(f"kv has strides {kv.stride()}: a layer of a page is not contiguous")
    return sources.contiguous(), targets.contiguous()


def _constants(pages_per_block: int, packed: PackedPages) -> dict[str, Any]:
    format = packed.format
    return {
        "PAGES_PER_BLOCK": pages_per_block,
        "PACKED_PER_BLOCK": packed.memory.shape[1],
        "KV_HEADS": packed.memory.shape[3],
        "PAGE_TOKENS": format.page_tokens,
        "HEAD_DIM": format.head_dim,
        "GROUP_TOKENS": format.group_tokens,
        "FORMAT": format.name,
        "HEAD_BYTES": format.head_bytes,
        "PARTS": tuple(format.parts),
    }


def compile_cases() -> list[CompileCase]:
    """Both ways, for each format that the architecture has."""

    def cases(name: FormatName, dim: int) -> list[CompileCase]:
        format = PackedFormat(name, 64, dim)
        signature = {
            "kv": "*bf16:16",
            "packed": "*u8:16",
            **dict.fromkeys(("sources", "targets"), "*i32:16"),
            **dict.fromkeys(("block_stride", "page_stride", "layer_stride"), "i64:16"),
            "value_stride": "i32:16",
            **dict.fromkeys(("packed_block", "packed_page", "packed_layer"), "i64:16"),
        }
        constants = {
            "PAGES_PER_BLOCK": 8,
            "PACKED_PER_BLOCK": 28,
            "KV_HEADS": 8,
            "PAGE_TOKENS": 64,
            "HEAD_DIM": dim,
            "GROUP_TOKENS": format.group_tokens,
            "FORMAT": name,
            "HEAD_BYTES": format.head_bytes,
            "PARTS": tuple(format.parts),
        }
        pack = {**constants, "HALF": launch.bucket(dim // 2), "TRIED": SCALES_TRIED.get(name, 0)}
        architectures = (90, 100) if name == "fp8" else (80, 90, 100)
        unpack = {**constants, "DIM": padded(dim)}
        return [
            CompileCase(_pack_pages, {**signature, "sums": "*fp32:16"}, pack, 8, 2, architectures),
            CompileCase(_unpack_pages, signature, unpack, 8, 2, architectures),
        ]

    return [*cases("int4", 80), *cases("int8", 128), *cases("fp8", 128)]
