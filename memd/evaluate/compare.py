"""Runs a model over a text under several policies at once, and compares what it predicts.

All are computed chunk by chunk beside the full KV, so that no logits have to be kept.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memd.evaluate.bounded import BoundedSequence
from memd.evaluate.policy import KVPolicy
from memd.evaluate.sequence import PagedSequence
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder
from memd.pool.packing import packing_step_tokens


@dataclass
class Quality:
    """What a policy predicts, against full KV; sums over the predicted tokens.

    Attributes:
        nats: Negative log-likelihood of the text.
        agreed: Tokens whose likeliest prediction is the same.
        divergence: Kullback-Leibler divergence from full KV, nats.
        predicted: Tokens counted: all but the first.
        packing_errors: Of packed pages; see `PagedSequence.errors`.
    """

    nats: float = 0.0
    agreed: int = 0
    divergence: float = 0.0
    predicted: int = 0
    packing_errors: Sequence[Tensor] = ()

    @property
    def perplexity(self) -> float:
        """Of the text; infinite where a logit is not finite."""
        mean = self.nats / self.predicted
        return math.exp(mean) if mean < 700 else math.inf

    def add(self, logprobs: Tensor, full: Tensor, targets: Tensor) -> None:
        """Count some tokens.

        Shapes:
            logprobs, full: [T, vocab_size], float32, under the policy and with full KV.
            targets: [T], int64, the tokens that came next.
        """
        self.nats -= logprobs.gather(1, targets[:, None]).double().sum().item()
        self.agreed += int((logprobs.argmax(1) == full.argmax(1)).sum())
        difference = full.exp() * (full - logprobs)
        self.divergence += difference.double().sum().item()
        self.predicted += len(targets)


class _Run:
    """A sequence under one policy, computed by a decoder that sees as far as the policy says."""

    def __init__(
        self, decoder: Decoder, policy: KVPolicy, sequence: PagedSequence | BoundedSequence
    ) -> None:
        self._decoder = decoder
        if policy.window is not None:
            self._decoder = decoder.with_window(policy.window, policy.sinks)
        self._sequence = sequence
        self.quality = Quality()
        if isinstance(sequence, PagedSequence):
            self.quality.packing_errors = sequence.errors

    def logprobs(self, token_ids: Tensor, start: int) -> Tensor:
        """Of the tokens that follow each of `token_ids`, [T, vocab_size] float32."""
        if isinstance(self._sequence, BoundedSequence):
            logits = self._bounded(self._sequence, token_ids, start)
        else:
            batch = self._sequence.chunk(token_ids, start)
            logits = self._decoder.forward(batch, self._sequence.kv, self._sequence.packed)
        return logits.log_softmax(1, dtype=torch.float32)

    def _bounded(self, sequence: BoundedSequence, token_ids: Tensor, start: int) -> Tensor:
        found, done = [], 0
        while done < len(token_ids):
            part = token_ids[done : done + sequence.room(start + done)]
            batch = sequence.chunk(part, start + done)
            found.append(self._decoder.forward(batch, sequence.kv))
            sequence.learn(batch)
            done += len(part)
        return torch.cat(found)


def compare(
    decoder: Decoder,
    config: ModelConfig,
    token_ids: Sequence[int],
    policies: Sequence[KVPolicy],
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[Quality]:
    """Predict each token of a text from those before it, under each policy.

    Args:
        decoder: The model, and `config` what it is.
        token_ids: At least 2.
        policies: May hold one that changes nothing; it is not computed twice.
        page_tokens: Tokens of a page.
        dtype: Of the parameters and of full pages.
        device: Where the parameters are.
        progress: Called with the tokens done so far.

    Returns:
        With full KV first, then under each policy.
    """

    def start(policy: KVPolicy) -> _Run:
        bound = policy.bound(page_tokens)
        if bound is not None:
            bounded = BoundedSequence(config, bound, len(token_ids), dtype, device)
            return _Run(decoder, policy, bounded)
        sequence = PagedSequence(config, policy, page_tokens, len(token_ids), dtype, device)
        return _Run(decoder, policy, sequence)

    full = start(KVPolicy())
    runs = [full if policy.changes_nothing else start(policy) for policy in policies]
    ids = torch.tensor(token_ids, dtype=torch.int64, device=device)
    step = packing_step_tokens(page_tokens)
    with torch.inference_mode():
        for position in range(0, len(ids), step):
            chunk = ids[position : position + step]
            targets = ids[position + 1 : position + step + 1]
            expected = full.logprobs(chunk, position)[: len(targets)]
            full.quality.add(expected, expected, targets)
            for run in runs:
                if run is not full:
                    found = run.logprobs(chunk, position)[: len(targets)]
                    run.quality.add(found, expected, targets)
            progress(min(position + step, len(ids)))
    return [full.quality, *(run.quality for run in runs)]
