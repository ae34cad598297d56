"""Sequences whose pages are partly packed, in a memory of NaN that both formats share."""

from dataclasses import dataclass

import torch
from memd_kernels import reference
from memd_kernels.formats import (
    PACKED_PAGE,
    FormatName,
    PackedFormat,
    PackedPages,
    view_packed,
)
from memd_kernels.reference.packed import read_packed
from torch import Tensor

from .conftest import MakeKV
from .test_attention import LAYER, fill


@dataclass
class PackedCase:
    """Contents are [2, num_kv_heads, tokens, head_dim] of each sequence, as packed pages say."""

    q: Tensor
    kv: Tensor
    packed: PackedPages
    table: Tensor
    contents: list[Tensor]

    def to(self, device: torch.device) -> "PackedCase":
        """The same on a device; contents stay on the host."""
        if self.kv.device == device:
            return self
        memory = self.packed.memory
        moved = torch.empty_strided(
            memory.shape, memory.stride(), dtype=memory.dtype, device=device
        )
        packed = PackedPages(self.packed.format, moved.copy_(memory))
        tensors = (part.to(device) for part in (self.q, self.kv))
        return PackedCase(*tensors, packed, self.table.to(device), self.contents)


def make_packed(kv: Tensor, name: FormatName, pages: int = 6) -> PackedPages:
    """Room for packed pages beside `kv`, three a block, of bytes that are NaN in every part."""
    layers, _, heads, tokens, dim = kv.shape[2:]
    format = PackedFormat(name, tokens, dim)
    block_bytes = 3 * format.page_bytes(layers, heads) + 48
    arena = torch.full((-(-pages // 3) * block_bytes,), 255, dtype=torch.uint8, device=kv.device)
    return view_packed(arena, format, block_bytes, layers, heads)


def make_packed_case(
    make_kv: MakeKV,
    name: FormatName,
    lens: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    rows: int | None = None,
    page_tokens: int = 16,
    head_dim: int = 8,
    order: str = "middle",
    dtype: torch.dtype = torch.float32,
) -> PackedCase:
    """Sequences of which pages are packed: those in the `middle`, any (`shuffled`) or `all`.

    The last, partial page is full, but for `all`. A full page that was packed is filled with NaN.
    """
    pages = sum(-(-length // page_tokens) for length in lens) + 2
    shape = {"num_kv_heads": kv_heads, "page_tokens": page_tokens, "head_dim": head_dim}
    kv = make_kv(num_blocks=-(-pages // 3), waste=7, dtype=dtype, **shape)
    table, contents = fill(kv, lens, [0] * len(lens))
    generator = torch.Generator().manual_seed(len(lens))
    packed = make_packed(kv, name, pages)
    free = torch.randperm(packed.num_pages, generator=generator).tolist()
    for row, length in enumerate(lens):
        count = length // page_tokens
        chosen = {
            "middle": range(1, count - 1),
            "shuffled": torch.randperm(count, generator=generator)[: count // 2].tolist(),
            "all": range(-(-length // page_tokens)),
        }[order]
        for column in chosen:
            pack(kv, packed, table[row, column], free.pop())
            page = int(table[row, column]) - PACKED_PAGE
            read = torch.stack(read_packed(packed, LAYER, torch.tensor([page])))[:, :, 0]
            start = column * page_tokens
            stop = min(start + page_tokens, length)
            contents[row][:, :, start:stop] = read[:, :, : stop - start].to(dtype)
        table[row, -(-length // page_tokens) :] = 2**31 - 1
    queries = torch.randn(rows or len(lens), heads, head_dim, generator=generator).to(dtype)
    return PackedCase(queries, kv, packed, table, contents)


def pack(kv: Tensor, packed: PackedPages, entry: Tensor, target: int) -> None:
    """Pack the page of a table's entry, which then names the packed page.

    Slots of a partial page hold NaN, which cannot be packed: they are zeros by then.
    """
    page = kv[divmod(int(entry), kv.shape[1])]
    page.nan_to_num_(0.0)
    numbers = (torch.tensor([value], dtype=torch.int32) for value in (int(entry), target))
    reference.pack_pages(kv, packed, *numbers)
    page.fill_(torch.nan)
    entry.fill_(PACKED_PAGE + target)
