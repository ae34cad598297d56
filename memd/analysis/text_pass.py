"""A model run over one text outside the engine."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from memd.evaluate.sequence import PagedSequence
from memd.models.decoder import Decoder

CHUNK_TOKENS = 256  # bounds logits and attention patterns, not the result


def run_text(
    decoder: Decoder,
    token_ids: Tensor,
    sequence: PagedSequence,
    on_logits: Callable[[int, Tensor], None] | None = None,
) -> None:
    """Run a text as prefill chunks.

    Args:
        decoder: Of the model.
        token_ids: [T] int64, on the decoder's device.
        sequence: Of so many tokens, all of them kept in full; its pages are written.
        on_logits: Called for each chunk with the position of its first token and [n, vocab_size]
            in the model's dtype; None: logits are not wanted.
    """
    for start in range(0, len(token_ids), CHUNK_TOKENS):
        batch = sequence.chunk(token_ids[start : start + CHUNK_TOKENS], start)
        if on_logits is None:
            batch = replace(batch, logits_rows=batch.positions[:1] - start)
        logits = decoder.forward(batch, sequence.kv)
        if on_logits is not None:
            on_logits(start, logits)
