"""A model run over one text outside the engine, with pages of its own."""

from collections.abc import Callable

import torch
from torch import Tensor

from memd.automatic import PAGE_TOKENS
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder, ForwardBatch

CHUNK_TOKENS = 256  # bounds logits and attention patterns, not the result


def empty_pages(
    config: ModelConfig, tokens: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Zeroed KV of one sequence, [1, pages, layers, 2, KV heads, page_tokens, head_dim]."""
    page_tokens = PAGE_TOKENS[device.type]
    pages = -(-tokens // page_tokens)
    shape = (config.num_layers, 2, config.num_kv_heads, page_tokens, config.head_dim)
    return torch.zeros((1, pages, *shape), dtype=dtype, device=device)


def run_text(
    decoder: Decoder,
    token_ids: Tensor,
    kv: Tensor,
    on_logits: Callable[[int, Tensor], None] | None = None,
) -> None:
    """Run a text as prefill chunks.

    Args:
        decoder: Of the model.
        token_ids: [T] int64, on the decoder's device.
        kv: See `empty_pages`; written.
        on_logits: Called for each chunk with the position of its first token and [n, vocab_size];
            None: logits are not wanted.
    """
    device, page_tokens = token_ids.device, kv.shape[5]
    pages = torch.arange(kv.shape[1], dtype=torch.int32, device=device)[None]
    for start in range(0, len(token_ids), CHUNK_TOKENS):
        chunk = token_ids[start : start + CHUNK_TOKENS]
        positions = torch.arange(start, start + len(chunk), device=device)
        batch = ForwardBatch(
            token_ids=chunk,
            positions=positions,
            write_pages=positions // page_tokens,
            write_offsets=positions % page_tokens,
            page_table=pages,
            num_decodes=0,
            query_starts=torch.tensor([0, len(chunk)], dtype=torch.int32, device=device),
            kv_lens=torch.tensor([start + len(chunk)], dtype=torch.int32, device=device),
            logits_rows=positions[:1] - start if on_logits is None else None,
        )
        logits = decoder.forward(batch, kv)
        if on_logits is not None:
            on_logits(start, logits)


def perplexity(decoder: Decoder, token_ids: Tensor, kv: Tensor) -> float:
    """exp of the mean negative log-likelihood of each token but the first.

    Shapes:
        token_ids: [T] int64, T at least 2.
    """
    total = torch.zeros((), dtype=torch.float64, device=token_ids.device)

    def add(start: int, logits: Tensor) -> None:
        following = token_ids[start + 1 : start + 1 + len(logits)]
        chosen = logits[: len(following)].log_softmax(-1).gather(1, following[:, None])
        total.sub_(chosen.double().sum())

    run_text(decoder, token_ids, kv, add)
    return float((total / (len(token_ids) - 1)).exp())
