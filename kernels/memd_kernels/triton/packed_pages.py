"""Packs pages, unpacks them and moves packed ones, all layers in one launch."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memd_kernels import launch
from memd_kernels.compile import CompileCase
from memd_kernels.formats import FormatName, PackedFormat, PackedPages
from memd_kernels.reference.packed import SCALES_TRIED, check_ids
from memd_kernels.triton.attend import padded
from memd_kernels.triton.packed_launch import check_device
from memd_kernels.triton.pages import move_memory
from memd_kernels.triton.quantise import pack_side
from memd_kernels.triton.unpack import load_channels


@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])
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
    UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
    TRIED: tl.constexpr,
):
    """One program for one unit of tokens of one head, layer and page."""
    unit = tl.program_id(0)
    layer = tl.program_id(1) // KV_HEADS
    head = tl.program_id(1) % KV_HEADS
    source = tl.load(sources + tl.program_id(2)).to(tl.int64)
    target = tl.load(targets + tl.program_id(2)).to(tl.int64)
    if source < 0:
        return
    at = kv + source // PAGES_PER_BLOCK * block_stride + source % PAGES_PER_BLOCK * page_stride
    at += layer.to(tl.int64) * layer_stride
    at += (head * PAGE_TOKENS + unit * UNIT) * HEAD_DIM
    into = packed + target // PACKED_PER_BLOCK * packed_block
    into += target % PACKED_PER_BLOCK * packed_page + layer.to(tl.int64) * packed_layer
    into += head * HEAD_BYTES
    program = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    GROUPS: tl.constexpr = UNIT // GROUP_TOKENS
    sums += (program * tl.num_programs(0) + unit).to(tl.int64) * (2 * GROUPS + 2)
    GAP: tl.constexpr = PARTS[3] - PARTS[2] - PAGE_TOKENS // GROUP_TOKENS * HEAD_DIM
    if FORMAT != "fp8" and GAP > 0:  # equal pages are equal bytes
        tl.store(into + PARTS[3] - GAP + tl.arange(0, GAP), tl.zeros((GAP,), tl.uint8))
    for group in range(GROUPS):
        first = group * GROUP_TOKENS
        pack_side(
            at + first * HEAD_DIM, into, sums + 2 * group, unit * UNIT + first, PARTS[0], PARTS[1],
            PARTS[2], True, FORMAT, TRIED, HEAD_DIM, HALF, GROUP_TOKENS, PAGE_TOKENS,
        )  # fmt: skip
    pack_side(
        at + value_stride, into, sums + 2 * GROUPS, unit * UNIT, PARTS[3], PARTS[4], PARTS[5],
        False, FORMAT, TRIED, HEAD_DIM, HALF, UNIT, PAGE_TOKENS,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])
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
        PAGE_TOKENS, HEAD_DIM, DIM,
    )  # fmt: skip
    tl.store(at, keys.to(kv.dtype.element_ty), mask=wanted)
    values = load_channels(
        out, token, token >= 0, PARTS[3], PARTS[4], PARTS[5], False, FORMAT, GROUP_TOKENS,
        PAGE_TOKENS, HEAD_DIM, DIM,
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
    units = format.page_tokens // format.unit_tokens
    parts = format.unit_tokens // format.group_tokens + 1
    # Of each unit: its groups of keys, then its values; squares of what is lost, and of all.
    sums = torch.zeros((len(sources), layers, heads, units, parts, 2), device=kv.device)
    if len(sources):
        found = launch.config("pack_pages", launch.capability(kv.device))
        _pack_pages[(units, layers * heads, len(sources))](
            kv,
            packed.memory,
            sources,
            targets,
            sums,
            *kv.stride()[:4],
            *packed.memory.stride()[:3],
            HALF=launch.bucket(format.head_dim // 2),
            UNIT=format.unit_tokens,
            TRIED=SCALES_TRIED.get(format.name, 0),
            num_warps=found.num_warps,
            **_constants(kv.shape[1], packed),
        )
    keys, values = sums[..., :-1, :].sum((3, 4)), sums[..., -1, :].sum(3)
    lost, squares = torch.stack((keys, values), 3).unbind(-1)
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
        pack = {
            **constants,
            "HALF": launch.bucket(dim // 2),
            "UNIT": format.unit_tokens,
            "TRIED": SCALES_TRIED.get(name, 0),
        }
        architectures = (90, 100) if name == "fp8" else (80, 90, 100)
        unpack = {**constants, "DIM": padded(dim)}
        return [
            CompileCase(_pack_pages, {**signature, "sums": "*fp32:16"}, pack, 8, 2, architectures),
            CompileCase(_unpack_pages, signature, unpack, 8, 2, architectures),
        ]

    return [*cases("int4", 80), *cases("int8", 128), *cases("fp8", 128)]
