"""Packed pages: keys and values of a page in fewer bits, with what it takes to read them.

`int8` and `int4` write a number of a group as `offset + scale * (code_base + code)`: keys in groups
of `group_tokens` tokens of one channel, values in groups of one token, because keys have channels
that are large throughout and values do not (KIVI, arXiv 2402.02750). Offsets are float16; a scale
is a byte, the upper bits of a float16. `fp8` writes e4m3 numbers, each token with a float16 scale.

Codes lie so that a kernel needs few instructions to read them: a byte 0x64 before a code makes it
the float16 number 1024 + code, and a nibble shifted up by four 1024 + 16 * code. Hence `code_base`,
which one fused multiply and add takes away again with the scale. What is summed over in a matrix
product lies together: of keys the channels of a token, of values the tokens of a channel.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

FormatName = Literal["int8", "int4", "fp8"]

PACKED_PAGE = 1 << 30  # in an entry of a page table: the rest is the number of a packed page
GROUP_TOKENS: dict[FormatName, int] = {"int8": 64, "int4": 32, "fp8": 64}
UNIT_TOKENS = 64  # at most; read at once
FORMAT_NAMES: tuple[FormatName, ...] = ("int8", "int4", "fp8")
_PAGE_ALIGNMENT = 256
_PART_ALIGNMENT = 16  # bytes of the widest load


class HeadParts(NamedTuple):
    """Where the parts of one head of a page begin, and where they end, in bytes.

    T tokens, D channels, G groups, U tokens of a unit, B bits of a code. `fp8` has no offsets:
    nothing lies between their start and the next part's.

    Attributes:
        keys: [T, D * B / 8] codes. `int4` has channel d in the lower half of a byte and channel
            D/2 + d in the upper; of each four bytes the second and third have changed places.
        key_offsets: [G, D] float16.
        key_scales: [G, D] bytes; `fp8`: [T] float16.
        values: [D, T * B / 8] codes. `int4` has token t of a unit in the lower half of a byte and
            token U/2 + t in the upper; bytes have changed places as in `keys`.
        value_offsets: [T] float16.
        value_scales: [T] bytes; `fp8`: [T] float16.
        end: bytes of a head.
    """

    keys: int
    key_offsets: int
    key_scales: int
    values: int
    value_offsets: int
    value_scales: int
    end: int


@dataclass(frozen=True)
class PackedFormat:
    """How one head of a packed page lies in memory.

    Args:
        name: `int8`, `int4` or `fp8`.
        page_tokens: Tokens of a page, a power of two from 16 on: as many as a full page holds.
        head_dim: A multiple of 8.

    Raises:
        ValueError: one of them is something else.
    """

    name: FormatName
    page_tokens: int
    head_dim: int

    def __post_init__(self) -> None:
        tokens, dim = self.page_tokens, self.head_dim
        if self.name not in FORMAT_NAMES:
            raise ValueError(f"page format is {self.name!r}, must be one of {list(FORMAT_NAMES)}")
        if tokens < 16 or tokens & (tokens - 1):
            raise ValueError(f"page_tokens is {tokens}, must be a power of two from 16 on")
        if dim < 8 or dim % 8:
            raise ValueError(f"head_dim is {dim}, must be a multiple of 8")

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.name == "int4" else 8

    @property
    def code_base(self) -> int:
        """What a scale is multiplied with beside the code; not of `fp8`."""
        return 64 if self.name == "int4" else 1024

    @property
    def group_tokens(self) -> int:
        """Tokens whose keys share offset and scale of a channel; not of `fp8`."""
        return min(GROUP_TOKENS[self.name], self.page_tokens)

    @property
    def unit_tokens(self) -> int:
        """Tokens whose values lie in one run of bytes of each channel."""
        return min(UNIT_TOKENS, self.page_tokens)

    @cached_property
    def parts(self) -> HeadParts:
        """Where the parts of one head begin."""
        tokens, codes = self.page_tokens, self.page_tokens * self.head_dim * self.bits // 8
        groups = tokens // self.group_tokens * self.head_dim
        if self.name == "fp8":
            sizes = (codes, 0, 2 * tokens, codes, 0, 2 * tokens)
        else:
            sizes = (codes, 2 * groups, groups, codes, 2 * tokens, tokens)
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _PART_ALIGNMENT) * _PART_ALIGNMENT)
        return HeadParts(*starts)

    @property
    def head_bytes(self) -> int:
        """Bytes of one layer and KV head of a page: codes, offsets and scales."""
        return self.parts.end

    def page_bytes(self, num_layers: int, num_kv_heads: int) -> int:
        """Bytes from one page to the next, a multiple of 256."""
        size = num_layers * num_kv_heads * self.head_bytes
        return -(-size // _PAGE_ALIGNMENT) * _PAGE_ALIGNMENT


@dataclass(frozen=True)
class PackedPages:
    """The packed pages beside full ones: a second view of the same memory.

    Packed page `p` is `memory[p // packed_pages_per_block, p % packed_pages_per_block]`.

    Attributes:
        format: How a head of a page lies.
        memory: [num_blocks, packed_pages_per_block, num_layers, num_kv_heads, head_bytes], uint8.
            Layers and heads of a page are contiguous; pages and blocks begin at multiples of 16
            bytes.

    Raises:
        ValueError: `memory` is not so.
    """

    format: PackedFormat
    memory: Tensor

    def __post_init__(self) -> None:
        memory, size = self.memory, self.format.head_bytes
        if memory.dtype != torch.uint8 or memory.ndim != 5 or memory.shape[4] != size:
            raise ValueError(
                f"packed pages are {tuple(memory.shape)} {memory.dtype}, not uint8 of "
                f"[blocks, pages, layers, heads, {size}]"
            )
        block_stride, page_stride, *strides = memory.stride()
        begins = (memory.data_ptr(), block_stride, page_stride)
        if strides != [memory.shape[3] * size, size, 1] or any(begin % 16 for begin in begins):
            raise ValueError(
                f"packed pages have strides {memory.stride()} and begin at {memory.data_ptr():#x}: "
                "layers and heads must be contiguous, pages begin at multiples of 16 bytes"
            )

    @property
    def is_cuda(self) -> bool:
        """Whether the pages are on a CUDA device, as of a tensor."""
        return self.memory.is_cuda

    @property
    def num_pages(self) -> int:
        """Packed pages that the whole memory would hold."""
        return self.memory.shape[0] * self.memory.shape[1]

    def check(self, kv: Tensor) -> None:
        """Refuse pages that are not of the same model as full ones.

        Shapes:
            kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim].

        Raises:
            ValueError: layers, heads, tokens of a page, head_dim or device differ.
        """
        found = (*self.memory.shape[2:4], self.format.page_tokens, self.format.head_dim)
        expected = (kv.shape[2], *kv.shape[4:])
        if found != expected:
            raise ValueError(
                f"packed pages are of {found} [layers, heads, tokens, dim], full ones of {expected}"
            )
        if self.memory.device != kv.device:
            raise ValueError(f"packed pages are on {self.memory.device}, full ones on {kv.device}")


def view_packed(
    arena: Tensor, format: PackedFormat, block_bytes: int, num_layers: int, num_kv_heads: int
) -> PackedPages:
    """The packed pages of an arena whose blocks are `block_bytes` long; no copy.

    Shapes:
        arena: [num_blocks * block_bytes], uint8, beginning at a multiple of 16 bytes.

    Raises:
        ValueError: the arena is not whole blocks of bytes, or a block holds no packed page.
    """
    page_bytes = format.page_bytes(num_layers, num_kv_heads)
    if arena.dtype != torch.uint8 or arena.ndim != 1 or arena.stride(0) != 1:
        raise ValueError(f"arena is {tuple(arena.shape)} {arena.dtype}, not contiguous bytes")
    if block_bytes < page_bytes or block_bytes % 16 or arena.numel() % block_bytes:
        raise ValueError(
            f"block_bytes is {block_bytes}: must divide the arena's {arena.numel()} bytes, be a "
            f"multiple of 16 and hold a packed page of {page_bytes} bytes"
        )
    head = format.head_bytes
    memory = arena.as_strided(
        (
            arena.numel() // block_bytes,
            block_bytes // page_bytes,
            num_layers,
            num_kv_heads,
            head,
        ),
        (block_bytes, page_bytes, num_kv_heads * head, head, 1),
    )
    return PackedPages(format, memory)
