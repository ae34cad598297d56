"""One sequence's pages on the device, kept as a policy says; the pool in small."""

import torch
from memd_kernels import pack_pages
from memd_kernels.formats import PACKED_PAGE, PackedFormat, PackedPages, view_packed
from torch import Tensor

from memd.evaluate.policy import KVPolicy
from memd.models.config import ModelConfig
from memd.models.decoder import ForwardBatch
from memd.pool.packing import packing_step_tokens


class PagedSequence:
    """Pages of a sequence that is computed from its beginning, in chunks.

    Args:
        config: The model's.
        policy: Which pages are packed, and which dropped.
        page_tokens: Tokens of a page.
        num_tokens: Length that the sequence will have.
        dtype: Of full pages.
        device: Where they lie.
        pages_per_block: Of full pages, for which kernels are compiled; None: all in one block.

    Attributes:
        kv: Full pages, as `Decoder.forward` takes them.
        packed: Packed pages; None: there are none.
        errors: What `pack_pages` said, each time: [pages, num_layers, num_kv_heads, 2].
    """

    def __init__(
        self,
        config: ModelConfig,
        policy: KVPolicy,
        page_tokens: int,
        num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        pages_per_block: int | None = None,
    ) -> None:
        self._policy = policy
        self._page_tokens = page_tokens
        self.errors: list[Tensor] = []
        full, packed = _most_pages(policy, page_tokens, num_tokens)
        heads, dim = config.num_kv_heads, config.head_dim
        page = (config.num_layers, 2, heads, page_tokens, dim)
        per_block = pages_per_block or full
        blocks = -(-full // per_block)
        self.kv = torch.zeros((blocks, per_block, *page), dtype=dtype, device=device)
        self.packed: PackedPages | None = None
        if packed and policy.kv != "full":
            form = PackedFormat(policy.kv, page_tokens, dim)
            size_bytes = packed * form.page_bytes(config.num_layers, heads)
            memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
            self.packed = view_packed(memory, form, size_bytes, config.num_layers, heads)
        self._free = list(range(full))
        self._free_packed = list(range(packed))
        self._table: list[int] = []  # page ids of all pages so far; what is dropped is not read
        self._held: list[int] = []  # indices of those that are not dropped

    def chunk(self, token_ids: Tensor, start: int) -> ForwardBatch:
        """Make room for the tokens from `start` on, and give the batch that computes them.

        Before, what is due is packed, and pages that no token sees any more are given back.

        Args:
            token_ids: [T] int64, on the device; they cross no multiple of the packing step, or
                are the first of a sequence in which nothing is packed.
            start: Tokens that the sequence has.
        """
        stop = start + len(token_ids)
        self._drop(start)
        self._pack(start)
        while len(self._table) * self._page_tokens < stop:
            self._held.append(len(self._table))
            self._table.append(self._free.pop(0))
        device = token_ids.device
        table = torch.tensor([self._table], dtype=torch.int32, device=device)
        positions = torch.arange(start, stop, device=device)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            write_pages=table[0, positions // self._page_tokens].long(),
            write_offsets=positions % self._page_tokens,
            page_table=table,
            num_decodes=0,
            query_starts=torch.tensor([0, stop - start], dtype=torch.int32, device=device),
            kv_lens=torch.tensor([stop], dtype=torch.int32, device=device),
            logits_rows=None,
        )

    def _drop(self, num_tokens: int) -> None:
        held = self._policy.held_pages(self._page_tokens, num_tokens)
        for index in set(self._held).difference(held):
            page = self._table[index]
            if page & PACKED_PAGE:
                self._free_packed.append(page ^ PACKED_PAGE)
            else:
                self._free.append(page)
        self._held = held

    def _pack(self, num_tokens: int) -> None:
        due = self._policy.packed_pages(self._page_tokens, num_tokens)
        indices = [index for index in due if not self._table[index] & PACKED_PAGE]
        if not indices or self.packed is None:
            return
        sources = [self._table[index] for index in indices]
        targets = [self._free_packed.pop(0) for _ in indices]
        device = self.kv.device
        errors = pack_pages(
            self.kv,
            self.packed,
            torch.tensor(sources, dtype=torch.int32, device=device),
            torch.tensor(targets, dtype=torch.int32, device=device),
        )
        self.errors.append(errors)
        for index, target in zip(indices, targets, strict=True):
            self._table[index] = target | PACKED_PAGE
        self._free += sources


def _most_pages(policy: KVPolicy, page_tokens: int, num_tokens: int) -> tuple[int, int]:
    """Full and packed pages that are there at once, at most."""
    step, most_full, most_packed = packing_step_tokens(page_tokens), 0, 0
    for start in range(0, num_tokens, step):
        held = len(policy.held_pages(page_tokens, start))
        packed = len(policy.packed_pages(page_tokens, start))
        new = -(-min(start + step, num_tokens) // page_tokens) - start // page_tokens
        most_full = max(most_full, held + new - packed)
        most_packed = max(most_packed, packed)
    return most_full, most_packed
