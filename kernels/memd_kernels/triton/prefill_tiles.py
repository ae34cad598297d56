"""Tiles of keys and values for the portable prefill kernel, out of pages of either format."""

import triton
import triton.language as tl

from memd_kernels.formats import FORMAT_NAMES
from memd_kernels.triton.unpack import PACKED_PAGE, load_channels

_FORMAT_NAMES = tl.constexpr(FORMAT_NAMES)


@triton.jit
def _load_tile_of_either(
    kv,
    packed_head,
    table,
    start,
    kv_len,
    block_stride,
    page_stride,
    head_start,
    value_stride,
    packed_block,
    packed_page,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """A tile of a page that may be packed; no load is in flight before its page is known."""
    entry = tl.load(table + start // PAGE_TOKENS)
    page = (entry & (PACKED_PAGE - 1)).to(tl.int64)
    inside = start % PAGE_TOKENS + tl.arange(0, KEYS)
    known = start + tl.arange(0, KEYS) < kv_len
    if entry >= PACKED_PAGE:
        FORMAT: tl.constexpr = _FORMAT_NAMES[PACKED[0]]
        PER_BLOCK: tl.constexpr = PACKED[1]
        head = packed_head + page // PER_BLOCK * packed_block + page % PER_BLOCK * packed_page
        PARTS: tl.constexpr = PACKED[3]
        k = load_channels(
            head, inside, known, PARTS[0], PARTS[1], PARTS[2], True, FORMAT, PACKED[2],
            PAGE_TOKENS, HEAD_DIM, PADDED_DIM,
        ).to(kv.dtype.element_ty)  # fmt: skip
        v = load_channels(
            head, inside, known, PARTS[3], PARTS[4], PARTS[5], False, FORMAT, PACKED[2],
            PAGE_TOKENS, HEAD_DIM, PADDED_DIM,
        ).to(kv.dtype.element_ty)  # fmt: skip
    else:
        dims = tl.arange(0, PADDED_DIM)[None, :]
        offset = page // PAGES_PER_BLOCK * block_stride + page % PAGES_PER_BLOCK * page_stride
        pointers = kv + (offset + head_start) + (inside[:, None] * HEAD_DIM + dims)
        wanted = known[:, None] & (dims < HEAD_DIM)
        k = tl.load(pointers, mask=wanted, other=0.0)
        v = tl.load(pointers + value_stride, mask=wanted, other=0.0)
    return k, v


@triton.jit
def load_tile(
    kv,
    descriptor,
    table,
    start,
    kv_len,
    block_stride,
    page_stride,
    head_start,
    value_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    packed_head,
    packed_block,
    packed_page,
    PACKED: tl.constexpr,
):
    """Keys and values of KEYS tokens from `start` on, each [KEYS, PADDED_DIM]."""
    tokens = tl.arange(0, KEYS)
    if TMA:  # strides count rows of HEAD_DIM elements
        page = tl.load(table + start // PAGE_TOKENS)
        row = page // PAGES_PER_BLOCK * block_stride + page % PAGES_PER_BLOCK * page_stride
        row += head_start + start % PAGE_TOKENS
        k = descriptor.load([row, 0])  # [KEYS, HEAD_DIM]
        v = descriptor.load([row + value_stride, 0])
        if MASKED:  # the rest of the last page may hold NaN, which no weight of zero undoes
            v = tl.where((start + tokens < kv_len)[:, None], v, 0.0)
    elif PACKED is not None:
        k, v = _load_tile_of_either(
            kv, packed_head, table, start, kv_len, block_stride, page_stride, head_start,
            value_stride, packed_block, packed_page, HEAD_DIM, PADDED_DIM, PAGE_TOKENS,
            PAGES_PER_BLOCK, KEYS, PACKED,
        )  # fmt: skip
    else:
        dims = tl.arange(0, PADDED_DIM)
        if PAGE_TOKENS >= KEYS:
            page = tl.load(table + start // PAGE_TOKENS).to(tl.int64)
            inside = tokens
            head_start += start % PAGE_TOKENS * HEAD_DIM
        else:  # a tile of several pages: each token finds its own
            known = start + tokens < kv_len if MASKED else None
            page = tl.load(table + (start + tokens) // PAGE_TOKENS, mask=known).to(tl.int64)
            inside = tokens % PAGE_TOKENS
        offset = page // PAGES_PER_BLOCK * block_stride + page % PAGES_PER_BLOCK * page_stride
        if PAGE_TOKENS >= KEYS:  # a page's own offset alone needs 64 bits: fewer registers
            pointers = kv + (offset + head_start) + (inside[:, None] * HEAD_DIM + dims[None, :])
        else:
            pointers = kv + (offset + head_start + inside * HEAD_DIM)[:, None] + dims[None, :]
        if MASKED or HEAD_DIM != PADDED_DIM:
            wanted = (start + tokens < kv_len)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(pointers, mask=wanted, other=0.0)
            v = tl.load(pointers + value_stride, mask=wanted, other=0.0)
        else:
            k = tl.load(pointers)
            v = tl.load(pointers + value_stride)
    return k, v
