"""The toy model over packed pages: it finds every token in them exactly, or the text is another.

A token lies as four digits of base 4 in the first channels of its key, and reversed in those of its
value: packing loses far less than half of a digit, so that what the pool, the mover and the copiers
do with packed pages is checked by comparing texts, as with full ones.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import toy
from memd_kernels.formats import PACKED_PAGE, PackedPages
from memd_kernels.reference.packed import read_packed
from toy import Harness, ToyModel

from memd.models.decoder import ForwardBatch

CONFIG = replace(toy.CONFIG, head_dim=16)
WEIGHTS = torch.tensor([64, 16, 4, 1])


def digits(tokens: torch.Tensor) -> torch.Tensor:
    """[T] to [T, 4], float."""
    return (tokens[:, None] // WEIGHTS % 4).float()


@dataclass
class PackedToy(ToyModel):
    """Sees packed pages; counts how many it has read."""

    packed_pages_read: int = 0

    def write(self, batch: ForwardBatch, kv: torch.Tensor) -> None:
        pages = kv.flatten(0, 1)[:, 0, :, 0]  # [pages, 2, page_tokens, head_dim]
        token = torch.zeros(len(batch.token_ids), 2, pages.shape[-1])
        token[:, 0, :4] = digits(batch.token_ids)
        token[:, 1, :4] = token[:, 0, :4].flip(1)
        assert batch.write_pages.max() < len(pages), "tokens are written to full pages only"
        pages[batch.write_pages, :, batch.write_offsets] = token

    def read(
        self, table: torch.Tensor, length: int, kv: torch.Tensor, packed: PackedPages | None
    ) -> list[int]:
        entries = table[: -(-length // kv.shape[5])].long()
        is_packed = entries >= PACKED_PAGE
        pages = kv.flatten(0, 1)[entries.masked_fill(is_packed, 0), 0, :, 0]
        if is_packed.any():  # [pages, 2, page_tokens, head_dim]
            assert packed is not None
            self.packed_pages_read += int(is_packed.sum())
            sides = read_packed(packed, 0, entries[is_packed] - PACKED_PAGE)
            pages[is_packed] = torch.stack([side[0] for side in sides], 1)
        keys, values = pages.transpose(0, 1).flatten(1, 2)[:, :length]
        return _told(keys, values)


def _told(keys: torch.Tensor, values: torch.Tensor) -> list[int]:
    """The tokens of keys and values, [T, head_dim] each."""
    nearest = keys[:, :4].round()
    if not ((keys[:, :4] - nearest).abs() < 0.4).all() or (keys[:, 4:].abs() > 0.1).any():
        raise AssertionError("keys are not what was written")
    if not torch.equal(values[:, :4].round().flip(1), nearest):
        raise AssertionError("keys and values are of different tokens")
    return (nearest.long() @ WEIGHTS).tolist()


class PackedHarness(Harness):
    """An inline engine that packs pages early: 16 full tokens at the beginning and at the end."""

    config = CONFIG

    def __init__(self, *settings: str, form: str = "int8", **more: Any) -> None:
        packing = (
            f"kv.format={form}",
            "kv.full_precision_tokens=16",
            "kv.recent_tokens=16",
        )
        more.setdefault("model", PackedToy())
        super().__init__(*packing, *settings, **more)

    @property
    def packed(self) -> int:
        """Pages that were packed since the start."""
        return self.engine.pool.counters.packed
