"""What the kernels share that read packed pages: codes to numbers, in few instructions.

Converting integers is what reading packed pages costs. A byte permute, or a logic instruction,
turns two codes into two float16 numbers at once (1024 + code, for nibbles 1024 + 16 * code), and
one fused multiply and add of two gives what they stand for. In float32, and where kernels are
interpreted, the same is computed in plain Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from memd_kernels import launch
from memd_kernels.formats import PACKED_PAGE as PACKED_PAGE_BIT
from memd_kernels.formats import FormatName, PackedFormat, PackedPages

PACKED_PAGE = tl.constexpr(PACKED_PAGE_BIT)
FP8_CAPABILITY = (8, 9)


@triton.jit
def scale_of(byte):
    """What the byte of a scale stands for, float16."""
    return (byte.to(tl.int16) << 7).to(tl.float16, bitcast=True)


@triton.jit
def byte_of(channel, FORMAT: tl.constexpr, HALF_DIM: tl.constexpr):
    """Where the code of a channel lies among a token's codes; see `HeadParts`."""
    if FORMAT == "int4":
        channel = channel % HALF_DIM
        return (channel & -4) | (channel & 1) << 1 | (channel >> 1 & 1)
    return channel


@triton.jit
def _fast_bytes(codes, scale, offset):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, base;
        mov.b32 base, 0x64646464;
        prmt.b32 low, $2, base, 0x4140;
        prmt.b32 high, $2, base, 0x4342;
        fma.rn.f16x2 $0, low, $3, $5;
        fma.rn.f16x2 $1, high, $4, $6;
        }""",
        "=r,=r,r,r,r,r,r",
        [codes, scale, offset],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _fast_nibbles(codes, low_scale, low_offset, high_scale, high_offset):
    # Each half of a word has four nibbles; the second, shifted to bits 4-7, is what is wanted. The
    # scales are those of 16 times the code.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 word, code;
        shl.b32 word, $4, 4;
        lop3.b32 code, word, 0x00f000f0, 0x64006400, 0xea;
        fma.rn.f16x2 $0, code, $5, $7;
        shr.u32 word, $4, 4;
        lop3.b32 code, word, 0x00f000f0, 0x64006400, 0xea;
        fma.rn.f16x2 $1, code, $6, $8;
        lop3.b32 code, $4, 0x00f000f0, 0x64006400, 0xea;
        fma.rn.f16x2 $2, code, $9, $11;
        shr.u32 word, $4, 8;
        lop3.b32 code, word, 0x00f000f0, 0x64006400, 0xea;
        fma.rn.f16x2 $3, code, $10, $12;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        [codes, low_scale, low_offset, high_scale, high_offset],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def number_of(code, scale, offset, BASE: tl.constexpr):
    """What a code stands for, float32; of fp8, whose code is a number, with BASE 0."""
    return offset.to(tl.float32) + scale.to(tl.float32) * (code.to(tl.float32) + BASE)


@triton.jit
def load_halves(
    codes,
    token,
    inside,
    low_scale,
    low_offset,
    high_scale,
    high_offset,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Lower and upper half of the channels of some tokens, each [TOKENS, HALF].

    Args:
        codes: Pointer to the codes of token 0 of the page.
        token: [TOKENS], which tokens.
        inside: [TOKENS], those that are read; of the others the codes are zeros.
        low_scale, low_offset, high_scale, high_offset: float16, of shapes that broadcast; of fp8
            the offsets are not looked at.
        WIDE: Return float32, else float16.
        FAST: Convert by instructions of the card; not with WIDE.
    """
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, HALF)
    wanted = inside[:, None] & (column < HALF_DIM)[None, :]
    if FORMAT == "int4":
        at = codes + token[:, None] * HALF_DIM
        if FAST:
            packed = tl.load(at + column[None, :], mask=wanted, other=0)
            low, high = _fast_nibbles(
                packed, low_scale * 0.0625, low_offset, high_scale * 0.0625, high_offset
            )
        else:
            packed = tl.load(at + byte_of(column, FORMAT, HALF)[None, :], mask=wanted, other=0)
            low = number_of(packed & 15, low_scale, low_offset, 64)
            high = number_of(packed >> 4, high_scale, high_offset, 64)
    else:
        at = codes + token[:, None] * HEAD_DIM + column[None, :]
        low = tl.load(at, mask=wanted, other=0)
        high = tl.load(at + HALF_DIM, mask=wanted, other=0)
        if FORMAT == "fp8":
            low = low.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            high = high.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            if WIDE:
                low = low.to(tl.float32)
                high = high.to(tl.float32)
            low = low * low_scale
            high = high * high_scale
        elif FAST:
            low = _fast_bytes(low, low_scale, low_offset)
            high = _fast_bytes(high, high_scale, high_offset)
        else:
            low = number_of(low, low_scale, low_offset, 1024)
            high = number_of(high, high_scale, high_offset, 1024)
    if WIDE:
        return low.to(tl.float32), high.to(tl.float32)
    else:
        return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def load_channels(
    head,
    token,
    inside,
    CODES: tl.constexpr,
    OFFSETS: tl.constexpr,
    SCALES: tl.constexpr,
    KEYS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Keys, or values, of some tokens with their channels in order: [TOKENS, DIM], float32.

    For kernels that do not live by how fast they read: a byte of two nibbles is read twice.

    Args:
        head: Pointer to the head of the page.
        token: [TOKENS], within the page.
        inside: [TOKENS], those that are read; the others are zeros.
    """
    column = tl.arange(0, DIM)[None, :]
    token = token[:, None]
    wanted = inside[:, None] & (column < HEAD_DIM)
    ROW_BYTES: tl.constexpr = HEAD_DIM // 2 if FORMAT == "int4" else HEAD_DIM
    at = head + CODES + token * ROW_BYTES + byte_of(column, FORMAT, HEAD_DIM // 2)
    codes = tl.load(at, mask=wanted, other=0)
    if FORMAT == "fp8":
        scales = (head + SCALES).to(tl.pointer_type(tl.float16))
        scale = tl.load(scales + token, mask=inside[:, None], other=0.0).to(tl.float32)
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    else:
        if KEYS:
            group = token // GROUP_TOKENS * HEAD_DIM + column
            known = wanted
        else:
            group = token
            known = inside[:, None]
        offsets = (head + OFFSETS).to(tl.pointer_type(tl.float16))
        offset = tl.load(offsets + group, mask=known, other=0.0)
        scale = scale_of(tl.load(head + SCALES + group, mask=known, other=0))
        BASE: tl.constexpr = 64 if FORMAT == "int4" else 1024
        if FORMAT == "int4":
            codes = codes >> (column // (HEAD_DIM // 2) * 4).to(tl.uint8) & 15
        return number_of(codes, scale, offset, BASE)


def packed_arguments(packed: PackedPages | None, kv: torch.Tensor) -> dict[str, Any]:
    """Arguments of a kernel that may read packed pages; without any, FORMAT is `full`.

    Raises:
        ValueError: the device has no instructions for the format.
    """
    if packed is None:
        strides = dict.fromkeys(("packed_block", "packed_page", "packed_layer"), 0)
        return {"packed": kv, **strides, **packed_constants(None, 0, 0), "FAST": False}
    check_device(packed)
    memory, format = packed.memory, packed.format
    block_stride, page_stride, layer_stride = memory.stride()[:3]
    return {
        "packed": memory,
        "packed_block": block_stride,
        "packed_page": page_stride,
        "packed_layer": layer_stride,
        **packed_constants(format.name, format.page_tokens, format.head_dim),
        "PACKED_PER_BLOCK": memory.shape[1],
        "FAST": packed.is_cuda and kv.dtype != torch.float32,
    }


def packed_constants(name: FormatName | None, page_tokens: int, head_dim: int) -> dict[str, Any]:
    """Constants of such a kernel, as they are compiled for cards that are not there."""
    if name is None:
        numbers = dict.fromkeys(("PACKED_PER_BLOCK", "GROUP_TOKENS", "HEAD_BYTES"), 1)
        return {"FORMAT": "full", **numbers, "PARTS": (0,) * 7, "FAST": False}
    format = PackedFormat(name, page_tokens, head_dim)
    return {
        "FORMAT": name,
        "PACKED_PER_BLOCK": 28,
        "GROUP_TOKENS": format.group_tokens,
        "HEAD_BYTES": format.head_bytes,
        "PARTS": tuple(format.parts),
        "FAST": True,
    }


def packed_signature(name: FormatName | None) -> dict[str, str]:
    """Types of such a kernel's arguments."""
    strides = ("packed_block", "packed_page", "packed_layer")
    if name is None:
        return {"packed": "*bf16:16", **dict.fromkeys(strides, "i32:16")}
    return {"packed": "*u8:16", **dict.fromkeys(strides, "i64:16")}


def check_device(packed: PackedPages) -> None:
    """Raise ValueError where the device has no instructions for the format."""
    capability = launch.capability(packed.memory.device)
    if packed.format.name == "fp8" and packed.is_cuda and capability < FP8_CAPABILITY:
        raise ValueError(
            "page format is fp8, which takes compute capability 8.9; this device has {}.{}".format(
                *capability
            )
        )
