"""One sequence under a budget of pages; the pool in small, as `memd.pool.retention` does it."""

import torch
from torch import Tensor

from memd.engine.attention_shares import averaged
from memd.models.config import ModelConfig
from memd.models.decoder import ForwardBatch
from memd.pool.budget import Budget


class BoundedSequence:
    """A sequence that lets go of pages when its budget is full.

    By attention share all tokens are computed by the attention of decoding, which measures the
    shares, and beyond the budget page by page: as if the text were being generated.

    Args:
        config: The model's.
        budget: What goes, and when.
        num_tokens: Length that the sequence will have.
        dtype: Of pages.
        device: Where they lie.

    Attributes:
        kv: Its pages, as `Decoder.forward` takes them.
    """

    def __init__(
        self,
        config: ModelConfig,
        budget: Budget,
        num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        page_tokens = budget.page_tokens
        self._budget = budget
        pages = min(budget.pages, -(-num_tokens // page_tokens))
        page = (config.num_layers, 2, config.num_kv_heads, page_tokens, config.head_dim)
        self.kv = torch.zeros((1, pages, *page), dtype=dtype, device=device)
        self._free = list(range(pages))
        self._table: list[int] = []
        self._dropped = 0
        self._shares: list[float] = []

    def room(self, start: int) -> int:
        """Tokens from a position on that may be computed at once."""
        page_tokens = self._budget.page_tokens
        if self._budget.policy == "recency":
            return self._budget.chunk_tokens(start)
        return page_tokens - start % page_tokens

    def chunk(self, token_ids: Tensor, start: int) -> ForwardBatch:
        """Make room for the tokens from `start` on, and give the batch that computes them.

        Args:
            token_ids: [T] int64, on the device, at most `room(start)`.
        """
        page_tokens, stop = self._budget.page_tokens, start + len(token_ids)
        wanted = -(-stop // page_tokens) - len(self._table) - self._dropped
        for index in reversed(self._budget.victims(len(self._table), wanted, self._shares)):
            self._free.append(self._table.pop(index))
            del self._shares[index : index + 1]
            self._dropped += 1
        self._table += [self._free.pop(0) for _ in range(wanted)]
        device = token_ids.device
        table = torch.tensor([self._table], dtype=torch.int32, device=device)
        positions = torch.arange(start, stop, device=device)
        stored = positions - self._dropped * page_tokens
        ends = (stored + 1).int()
        measured, count = self._budget.policy == "attention_share", len(token_ids)
        if measured:
            table = table.expand(count, -1).contiguous()
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            write_pages=table[0, stored // page_tokens].long(),
            write_offsets=stored % page_tokens,
            page_table=table,
            num_decodes=count if measured else 0,
            query_starts=ends.new_tensor([0] if measured else [0, count]),
            kv_lens=ends if measured else ends[-1:],
            logits_rows=None,
            shares=torch.zeros(table.shape, device=device) if measured else None,
        )

    def learn(self, batch: ForwardBatch) -> None:
        """Take the shares that the forward pass of a batch has measured, if it has."""
        if batch.shares is not None:
            found = batch.shares.sum(0)
            shares = (found / found.sum()).cpu().numpy()
            self._shares = averaged(self._shares, shares, batch.num_decodes)
