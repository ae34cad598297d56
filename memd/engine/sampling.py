"""From logits to tokens: penalties, masks and log-probabilities around the `sample` kernel."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import memd_kernels as kernels
import torch

from memd.engine.messages import TokenLogprobs
from memd.engine.request import Request


class Sampled(NamedTuple):
    """The next token of one request; `failed` when its logits are not numbers."""

    request: Request
    token_id: int
    logprobs: TokenLogprobs | None
    failed: bool


@dataclass(frozen=True)
class Vocabulary:
    """Which ids may be sampled: those below `size`; `eos` ends a sequence."""

    size: int
    eos_token_ids: frozenset[int]


def sample_tokens(
    logits: torch.Tensor, requests: list[Request], positions: torch.Tensor, vocabulary: Vocabulary
) -> tuple[torch.Tensor, list[Sampled]]:
    """Sample one token for each request, where some need more than logits and a draw for it.

    The draw depends on the request's seed and the token's position alone, so neither the batch nor
    a preemption changes what follows. Log-probabilities are those of the unmodified distribution.

    Shapes:
        logits: `[len(requests), vocab]`, float32; changed in place.
        positions: `[len(requests)]`, int64, of the tokens to sample.

    Returns:
        The tokens, `[len(requests)]` int64 on the device, and the same with what was asked for.
    """
    wanted = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
    unmodified = logits[wanted] if wanted else None
    for row, request in enumerate(requests):
        if request.needs_history:
            _adjust(logits[row], request, vocabulary)
    logits[:, vocabulary.size :] = -torch.inf

    device = logits.device
    params = [request.sampling for request in requests]

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    chosen, failed = kernels.sample(
        logits,
        seeds=column([p.seed for p in params], torch.int64),
        positions=positions,
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int64),
        top_p=column([p.top_p for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
    )
    token_ids, failures = chosen.tolist(), failed.tolist()
    logprobs: dict[int, TokenLogprobs] = {}
    if unmodified is not None:
        counts = [requests[row].sampling.logprobs or 0 for row in wanted]
        found = token_logprobs(unmodified, chosen[wanted], counts, vocabulary)
        logprobs = dict(zip(wanted, found, strict=True))
    return chosen, [
        Sampled(request, token_ids[row], logprobs.get(row), failures[row])
        for row, request in enumerate(requests)
    ]


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: list[int], vocabulary: Vocabulary
) -> list[TokenLogprobs]:
    """Natural log-probability of one token a row, and of the row's most likely ones, as messages.

    Shapes:
        logits: `[rows, vocab]`, float32. token_ids: `[rows]`, int64. counts: alternatives for each
        row.
    """
    top = min(max(counts, default=0), vocabulary.size)
    chosen, values, ids = kernels.token_logprobs(logits, token_ids, top, vocabulary.size)
    return [
        TokenLogprobs(logprob, list(zip(row_ids[:count], row_values[:count], strict=True)))
        for logprob, row_ids, row_values, count in zip(
            chosen.tolist(), ids.tolist(), values.tolist(), counts, strict=True
        )
    ]


def _adjust(logits: torch.Tensor, request: Request, vocabulary: Vocabulary) -> None:
    """Apply a request's penalties, biases and forbidden ends to its row, in place.

    Source:
        Presence and frequency penalties count the output, as OpenAI's API reference defines them;
        the repetition penalty counts prompt and output (Keskar et al., arXiv 1909.05858, section
        4.1).
    """
    params = request.sampling
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(request.tokens)), device=logits.device)
        scores = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(scores > 0, scores / factor, scores * factor)
    if (params.presence_penalty or params.frequency_penalty) and request.num_generated:
        occurrences = Counter(request.tokens[request.prompt_length :])
        ids = torch.tensor(list(occurrences), device=logits.device)
        counts = torch.tensor(list(occurrences.values()), device=logits.device)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if request.num_generated < params.min_tokens:
        ends = [*vocabulary.eos_token_ids, *params.stop_token_ids]
        logits[[end for end in ends if end < len(logits)]] = -torch.inf
