"""Packing of pages, and reading of packed ones, in plain torch.

Everything here is in float32; codes are chosen against offset and scale as they are stored, so
that rounding these adds little error.
"""

import torch
from torch import Tensor

from memd_kernels.formats import PACKED_PAGE, HeadParts, PackedFormat, PackedPages

FP8_MAX = 448.0
FP16_MAX = 65504.0
SCALE_SHIFT = 7  # a scale's byte is the exponent and 3 bits of the mantissa of a float16
MAX_BASE = 61440.0  # largest scale times `code_base`: so that float16 offsets can undo it
# Steps of 6 to 12 percent below the scale that reaches both ends of a group. With 16 codes, losing
# the ends a little pays for finer steps in between; with 256 it does not.
SCALES_TRIED = {"int4": 5, "int8": 1}


def pack_pages(kv: Tensor, packed: PackedPages, sources: Tensor, targets: Tensor) -> Tensor:
    """Write full pages, all their tokens and layers, as packed pages.

    A target may lie in no source's block, which holds pages of the other format.

    Shapes:
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim].
        packed: changed in place; of the same layers, heads, page_tokens and head_dim.
        sources: [N], int32, ids of full pages. Where one is -1, nothing is packed.
        targets: [N], int32, ids of packed pages, without `PACKED_PAGE`, each once.

    Returns:
        [N, num_layers, num_kv_heads, 2], float32; relative error of keys and of values: root of the
        sum of squared errors over the sum of squares. 0 where nothing is packed or all is zero, inf
        where something is no finite number.

    Raises:
        ValueError: a shape, dtype or device does not match the above; a page is out of range or a
            target named twice, which on CUDA is not noticed. Nothing is written.

    Source:
        Keys by channel and values by token after KIVI (arXiv 2402.02750). Sizes of groups, the
        scale's narrow format and its choice by least squares are memd's.
    """
    chosen = _check_moves(kv, packed, sources, targets)
    errors = kv.new_zeros((len(sources), *kv.shape[2::2][:2], 2), dtype=torch.float32)
    for index, source, target in chosen:
        page = kv[divmod(source, kv.shape[1])].float()  # [layers, 2, heads, tokens, dim]
        heads = packed.memory[divmod(target, packed.memory.shape[1])]
        write_heads(packed.format, page, heads)
        keys, values = read_heads(packed.format, heads)
        read = torch.stack((keys, values), 1)
        squares = page.square().sum((-2, -1))
        lost = (page - read).square().sum((-2, -1)) / torch.where(squares > 0, squares, 1.0)
        errors[index] = lost.sqrt().nan_to_num(nan=torch.inf).transpose(1, 2)
    return errors


def unpack_pages(packed: PackedPages, kv: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Write packed pages, all their tokens and layers, as full pages.

    Shapes:
        packed: of the same layers, heads, page_tokens and head_dim as `kv`.
        kv: [num_blocks, pages_per_block, num_layers, 2, num_kv_heads, page_tokens, head_dim],
            changed in place.
        sources: [N], int32, ids of packed pages, without `PACKED_PAGE`. Where one is -1, nothing
            is written.
        targets: [N], int32, ids of full pages, each once.

    Raises:
        ValueError: a shape, dtype or device does not match the above; a page is out of range or a
            target named twice, which on CUDA is not noticed. Nothing is written.
    """
    for _, target, source in _check_moves(kv, packed, targets, sources, unpack=True):
        keys, values = read_heads(
            packed.format, packed.memory[divmod(source, packed.memory.shape[1])]
        )
        kv[divmod(target, kv.shape[1])] = torch.stack((keys, values), 1).to(kv.dtype)


def move_packed_pages(packed: PackedPages, sources: Tensor, targets: Tensor) -> None:
    """Copy packed pages into other packed pages, bit for bit.

    The copies are made in any order: a page that one of them writes may be in no other.

    Shapes:
        packed: changed in place.
        sources, targets: [N], int32, ids without `PACKED_PAGE`. Where the source is -1, nothing is
            copied.

    Raises:
        ValueError: a shape or dtype does not match the above; a page is out of range or one that is
            written is in another copy, which on CUDA is not noticed. Nothing is copied.
    """
    check_ids(sources, targets)
    per_block = packed.memory.shape[1]
    moves = [move for move in zip(sources.tolist(), targets.tolist(), strict=True) if move[0] != -1]
    for page in (page for move in moves for page in move):
        _check_page("packed page", page, packed.num_pages)
    written = {target for _, target in moves}
    if len(written) < len(moves) or any(source in written for source, _ in moves):
        raise ValueError("a page that is written is in more than one copy")
    for source, target in moves:
        packed.memory[divmod(target, per_block)] = packed.memory[divmod(source, per_block)]


def find_packed(table: Tensor, packed: PackedPages, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tell the packed pages of a table from the full ones.

    Shapes:
        table: [N], int32, entries of a page table that are read.

    Returns:
        The table with 0 for packed pages; the indices of these, int64, and their ids, int64.

    Raises:
        ValueError: the packed pages do not fit `kv`, or the table names one that is not there.
    """
    packed.check(kv)
    is_packed = table >= PACKED_PAGE
    where = is_packed.nonzero().squeeze(1)
    ids = table[where].long() - PACKED_PAGE
    if len(ids) and int(ids.max()) >= packed.num_pages:
        raise ValueError(
            f"page_table names packed page {int(ids.max())}: there are {packed.num_pages}"
        )
    return table.masked_fill(is_packed, 0), where, ids


def read_packed(packed: PackedPages, layer: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """One layer of packed pages, unpacked.

    Shapes:
        ids: [N], int64, without `PACKED_PAGE`.

    Returns:
        Keys and values, each [num_kv_heads, N, page_tokens, head_dim], float32.
    """
    per_block = packed.memory.shape[1]
    heads = packed.memory[ids // per_block, ids % per_block, layer]
    return read_heads(packed.format, heads.transpose(0, 1))


def write_heads(format: PackedFormat, page: Tensor, heads: Tensor) -> None:
    """Pack a page, in place.

    Shapes:
        page: [layers, 2, kv_heads, page_tokens, head_dim], float32.
        heads: [layers, kv_heads, head_bytes], uint8, written.
    """
    parts = format.parts
    heads.zero_()  # what aligns the parts, too: equal pages are equal bytes
    for side, (codes_at, offsets_at, scales_at) in enumerate(_sides(parts)):
        x = page[:, side]  # [layers, kv_heads, tokens, dim]
        if format.name == "fp8":
            scale = (x.abs().amax(-1, keepdim=True) / FP8_MAX).half()
            codes = x / torch.where(scale > 0, scale, 1).float()
            codes = codes.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
            _put(heads, scales_at, scale.view(torch.uint8))
        else:
            tokens = format.group_tokens if side == 0 else 1
            grouped = x.unflatten(2, (-1, tokens))  # [layers, kv_heads, groups, tokens, dim]
            codes, offset, scale = quantise(grouped, 3 if side == 0 else 4, format)
            codes = codes.flatten(2, 3)
            _put(heads, offsets_at, offset.view(torch.uint8))
            _put(heads, scales_at, scale)
        _put(heads, codes_at, _arranged(codes, side, format))


def read_heads(format: PackedFormat, heads: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of packed heads.

    Shapes:
        heads: [..., head_bytes], uint8, the last axis contiguous.

    Returns:
        Each [..., page_tokens, head_dim], float32.
    """
    keys, values = (
        _read_side(format, heads, side, *starts) for side, starts in enumerate(_sides(format.parts))
    )
    return keys, values


def quantise(x: Tensor, dim: int, format: PackedFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, offset and scale of groups of numbers, of `int8` or `int4`.

    Of the scales that are tried, each group takes the one with the least squared error.

    Shapes:
        x: any shape, float32; a group is what lies along `dim`.

    Returns:
        Codes of the shape of `x`, uint8; offsets, float16, and scales as bytes, both of size 1
        along `dim`.
    """
    most, base = 2**format.bits - 1, format.code_base
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    centre, covering = low / 2 + high / 2, scale_byte(high / most - low / most, base)
    best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    for step in range(SCALES_TRIED[format.name]):
        byte = (covering - step).clamp_min(0)
        scale = scale_of(byte)
        divisor = torch.where(scale > 0, scale, 1.0)
        codes = ((x - centre) / divisor + most / 2).round().clamp(0, most)
        offset = (x - scale * codes).mean(dim, keepdim=True) - scale * base
        offset = offset.clamp(-FP16_MAX, FP16_MAX).half()
        minimum = offset.float() + scale * base
        codes = ((x - minimum) / divisor).round().clamp(0, most)
        error = (x - minimum - scale * codes).square().sum(dim, keepdim=True)
        if best is None:
            best = codes, offset, byte, error
            continue
        better = error < best[3]
        best = (
            torch.where(better, codes, best[0]),
            torch.where(better, offset, best[1]),
            torch.where(better, byte, best[2]),
            torch.where(better, error, best[3]),
        )
    assert best is not None
    return best[0].to(torch.uint8), best[1], best[2].to(torch.uint8)


def swap_bytes(codes: Tensor) -> Tensor:
    """Change places of the second and third of each four bytes of the last axis."""
    return codes.view(*codes.shape[:-1], -1, 2, 2).transpose(-1, -2).flatten(-3)


def scale_byte(scale: Tensor, code_base: int) -> Tensor:
    """The least scale that can be stored and is not below, as far as there is one; int32."""
    bits = scale.clamp(0, MAX_BASE / code_base).half().view(torch.int16).int()
    return (bits + (1 << SCALE_SHIFT) - 1) >> SCALE_SHIFT


def scale_of(byte: Tensor) -> Tensor:
    """What a stored scale stands for, float32."""
    return (byte.to(torch.int16) << SCALE_SHIFT).view(torch.float16).float()


def check_ids(sources: Tensor, targets: Tensor) -> None:
    """Raise ValueError where page ids are not two int32 vectors of one length."""
    for name, values in (("sources", sources), ("targets", targets)):
        if values.dtype != torch.int32 or values.ndim != 1 or len(values) != len(sources):
            raise ValueError(
                f"{name} is {tuple(values.shape)} {values.dtype}, not int32 of [{len(sources)}]"
            )


def _sides(parts: HeadParts) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Starts of codes, offsets and scales, of keys and of values."""
    return parts[:3], parts[3:6]


def _put(heads: Tensor, start: int, part: Tensor) -> None:
    flat = part.flatten(2)
    heads[..., start : start + flat.shape[-1]] = flat


def _read_side(
    format: PackedFormat, heads: Tensor, side: int, codes_at: int, offsets_at: int, scales_at: int
) -> Tensor:
    tokens, dim = format.page_tokens, format.head_dim

    def take(start: int, size: int, dtype: torch.dtype, *shape: int) -> Tensor:
        part = heads[..., start : start + size].view(dtype)
        return part.view(*part.shape[:-1], *shape)

    rows = tokens if side == 0 else dim
    codes = take(codes_at, tokens * dim * format.bits // 8, torch.uint8, rows, -1)
    codes = _in_order(codes, side, format)
    if format.name == "fp8":
        scale = take(scales_at, 2 * tokens, torch.float16, tokens, 1)
        return codes.view(torch.float8_e4m3fn).float() * scale.float()
    groups = (tokens // format.group_tokens, 1, dim) if side == 0 else (tokens, 1, 1)
    count = groups[0] * groups[2]
    offset = take(offsets_at, 2 * count, torch.float16, *groups).float()
    scale = scale_of(take(scales_at, count, torch.uint8, *groups))
    minimum = offset + scale * format.code_base
    grouped = codes.view(*codes.shape[:-2], groups[0], -1, dim)
    return torch.addcmul(minimum, grouped.float(), scale).flatten(-3, -2)


def _arranged(codes: Tensor, side: int, format: PackedFormat) -> Tensor:
    """Codes [..., tokens, dim] as they lie in memory; see `HeadParts`."""
    if side == 1:
        codes = codes.transpose(-1, -2)
    if format.bits == 8:
        return codes
    run = format.head_dim if side == 0 else format.unit_tokens
    low, high = codes.unflatten(-1, (-1, 2, run // 2)).unbind(-2)
    return swap_bytes((low | high << 4).flatten(-2))


def _in_order(codes: Tensor, side: int, format: PackedFormat) -> Tensor:
    """Codes [..., tokens, dim], contiguous, of what lies in memory."""
    if format.bits == 4:
        run = format.head_dim if side == 0 else format.unit_tokens
        codes = swap_bytes(codes).unflatten(-1, (-1, run // 2))
        codes = torch.stack((codes & 15, codes >> 4), -2).flatten(-3)
    return (codes.transpose(-1, -2) if side == 1 else codes).contiguous()


def _check_moves(
    kv: Tensor, packed: PackedPages, full_ids: Tensor, packed_ids: Tensor, unpack: bool = False
) -> list[tuple[int, int, int]]:
    """Index, full page and packed page of each move that is one."""
    sources, targets = (packed_ids, full_ids) if unpack else (full_ids, packed_ids)
    check_ids(sources, targets)
    packed.check(kv)
    pairs = enumerate(zip(sources.tolist(), full_ids.tolist(), packed_ids.tolist(), strict=True))
    moves = [(index, full, pack) for index, (source, full, pack) in pairs if source != -1]
    for _, full, pack in moves:
        _check_page("page", full, kv.shape[0] * kv.shape[1])
        _check_page("packed page", pack, packed.num_pages)
    written = {full if unpack else pack for _, full, pack in moves}
    if len(written) < len(moves):
        raise ValueError("targets name a page twice")
    return moves


def _check_page(kind: str, page: int, num_pages: int) -> None:
    if not 0 <= page < num_pages:
        raise ValueError(f"{kind} {page}: there are {num_pages}")
