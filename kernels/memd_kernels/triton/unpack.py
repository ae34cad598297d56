"""What the kernels share that read packed pages: codes to numbers, in few instructions.

Converting integers is what reading packed pages costs. A byte permute, or a logic instruction,
turns two codes into two float16 numbers at once (1024 + code, for nibbles 1024 + 16 * code), and
one fused multiply and add of two gives what they stand for. In float32, and where kernels are
interpreted, the same is computed in plain Triton.
"""

import triton
import triton.language as tl

from memd_kernels.formats import PACKED_PAGE as PACKED_PAGE_BIT
from memd_kernels.formats import UNIT_TOKENS as MOST_UNIT_TOKENS

PACKED_PAGE = tl.constexpr(PACKED_PAGE_BIT)
UNIT_TOKENS = tl.constexpr(MOST_UNIT_TOKENS)


@triton.jit
def scale_of(byte, FAST: tl.constexpr = False):
    """What the byte of a scale stands for, float16; FAST: two at a time."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            prmt.b32 low, $2, 0, 0x4140;
            prmt.b32 high, $2, 0, 0x4342;
            shl.b32 $0, low, 7;
            shl.b32 $1, high, 7;
            }""",
            "=r,=r,r",
            [byte],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return (byte.to(tl.int16) << 7).to(tl.float16, bitcast=True)


@triton.jit
def byte_of(index, FORMAT: tl.constexpr):
    """Where the code of an element lies in a run of codes, or of pairs; see `HeadParts`."""
    if FORMAT == "int4":
        return (index & -4) | (index & 1) << 1 | (index >> 1 & 1)
    return index


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
def _raw_bytes(codes):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 base;
        mov.b32 base, 0x64646464;
        prmt.b32 $0, $2, base, 0x4140;
        prmt.b32 $1, $2, base, 0x4342;
        }""",
        "=r,=r,r",
        [codes],
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
def _raw_nibbles(codes):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 word;
        shr.u32 word, $4, 8;
        lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $1, word, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $2, $4, 0x00f000f0, 0x64006400, 0xea;
        lop3.b32 $3, word, 0x00f000f0, 0x64006400, 0xea;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [codes],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def number_of(code, scale, offset, BASE: tl.constexpr):
    """What a code stands for, float32."""
    return offset.to(tl.float32) + scale.to(tl.float32) * (code.to(tl.float32) + BASE)


@triton.jit
def load_key_bytes(
    codes,
    first,
    there,
    scale,
    offset,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Keys of TOKENS tokens of `int8` or `fp8`: [TOKENS, DIM].

    Args:
        codes: Pointer to the keys' codes of the page.
        first: First of the tokens.
        there: Whether they are read; else the codes are zeros.
        scale, offset: [DIM], float16. Of fp8 they are not looked at: the keys come without scale.
        WIDE: Return float32, else float16.
        FAST: Convert by instructions of the card; not with WIDE.
    """
    channel = tl.arange(0, DIM)
    row = tl.arange(0, TOKENS)
    # A mask that is the same for all channels of a token leaves loads as wide as they can be.
    wanted = (row < tl.where(there, TOKENS, 0))[:, None]
    if DIM > HEAD_DIM:
        wanted = wanted & (channel < HEAD_DIM)[None, :]
    at = codes + (first + row)[:, None] * HEAD_DIM + channel[None, :]
    x = tl.load(at, mask=wanted, other=0)
    if FORMAT == "fp8":
        x = x.to(tl.float8e4nv, bitcast=True)
    elif FAST:
        x = _fast_bytes(x, scale[None, :], offset[None, :])
    else:
        x = number_of(x, scale[None, :], offset[None, :], 1024)
    if WIDE:
        return x.to(tl.float32)
    else:
        return x.to(tl.float16)


@triton.jit
def load_key_nibbles(
    codes,
    first,
    there,
    low_scale,
    low_offset,
    high_scale,
    high_offset,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    SIDE: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Lower and upper half of the channels of TOKENS tokens' keys of `int4`: [SIDE, HALF] each.

    Args:
        low_scale, low_offset, high_scale, high_offset: [HALF], float16.
        codes, first, there, WIDE, FAST: as in `load_key_bytes`.
    """
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, HALF)
    row = tl.arange(0, SIDE)
    wanted = (row < tl.where(there, TOKENS, 0))[:, None]
    if HALF > HALF_DIM:
        wanted = wanted & (column < HALF_DIM)[None, :]
    at = codes + (first + row)[:, None] * HALF_DIM
    if FAST:
        packed = tl.load(at + column[None, :], mask=wanted, other=0)
        return _fast_nibbles(
            packed,
            (low_scale * 0.0625)[None, :],
            low_offset[None, :],
            (high_scale * 0.0625)[None, :],
            high_offset[None, :],
        )
    else:
        packed = tl.load(at + byte_of(column, "int4")[None, :], mask=wanted, other=0)
        low = number_of(packed & 15, low_scale[None, :], low_offset[None, :], 64)
        high = number_of(packed >> 4, high_scale[None, :], high_offset[None, :], 64)
        if WIDE:
            return low, high
        else:
            return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def load_value_bytes(
    codes,
    first,
    there,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Codes of the values of `int8`, or numbers of `fp8`, without scale: [DIM, TOKENS].

    With FAST a code is 1024 more than it is.

    Args:
        codes: Pointer to the values' codes of the page.
        first, there, WIDE: as in `load_key_bytes`.
    """
    channel = tl.arange(0, DIM)
    token = tl.arange(0, TOKENS)
    wanted = (channel < tl.where(there, HEAD_DIM, 0))[:, None]
    at = codes + first + channel[:, None] * PAGE_TOKENS + token[None, :]
    x = tl.load(at, mask=wanted, other=0)
    if FORMAT == "fp8":
        x = x.to(tl.float8e4nv, bitcast=True)
    elif FAST:
        x = _raw_bytes(x)
    if WIDE:
        return x.to(tl.float32)
    else:
        return x.to(tl.float16)


@triton.jit
def load_value_nibbles(
    codes,
    first,
    there,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    SIDE: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Codes of the values of both halves of a unit of `int4`: [DIM, SIDE] each.

    With FAST these are 1024 + code of the first half, 1024 + 16 * code of the second.

    Args:
        first: First token of the unit.
        codes, there, WIDE: as in `load_value_bytes`.
    """
    channel = tl.arange(0, DIM)
    token = tl.arange(0, SIDE)
    wanted = (channel < tl.where(there, HEAD_DIM, 0))[:, None]
    if SIDE > UNIT // 2:
        wanted = wanted & (token < UNIT // 2)[None, :]
    at = codes + first // 2 + channel[:, None] * (PAGE_TOKENS // 2)
    if FAST:
        return _raw_nibbles(tl.load(at + token[None, :], mask=wanted, other=0))
    else:
        packed = tl.load(at + byte_of(token, "int4")[None, :], mask=wanted, other=0)
        if WIDE:
            return (packed & 15).to(tl.float32), (packed >> 4).to(tl.float32)
        else:
            return (packed & 15).to(tl.float16), (packed >> 4).to(tl.float16)


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
    PAGE_TOKENS: tl.constexpr,
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
    RUN: tl.constexpr = HEAD_DIM if KEYS else min(UNIT_TOKENS, PAGE_TOKENS)
    index = column if KEYS else token
    if FORMAT == "int4":
        shift = index % RUN // (RUN // 2) * 4
        index = index // RUN * (RUN // 2) + byte_of(index % (RUN // 2), FORMAT)
    BITS: tl.constexpr = 4 if FORMAT == "int4" else 8
    row = token * (HEAD_DIM * BITS // 8) if KEYS else column * (PAGE_TOKENS * BITS // 8)
    codes = tl.load(head + CODES + row + index, mask=wanted, other=0)
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
            codes = codes >> shift.to(tl.uint8) & 15
        return number_of(codes, scale, offset, BASE)
