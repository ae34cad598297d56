"""What a step produced, and how it comes to the host."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from memd.engine.messages import TokenLogprobs
from memd.engine.request import Request
from memd.engine.sampling import Sampled


@dataclass(frozen=True)
class StepResult:
    """What a step produced: next tokens, and log-probabilities of prompt tokens where asked for.

    Args:
        replayed: All of it ran from graphs.
        shared_prefix: A prefix was read once for several sequences.
    """

    sampled: list[Sampled]
    prompt_logprobs: list[tuple[Request, list[TokenLogprobs | None]]]
    replayed: bool = False
    shared_prefix: bool = False


Collect = Callable[[], StepResult]  # waits for the results


def fetch(
    results: torch.Tensor,
    requests: list[Request],
    prompts: list[tuple[Request, list[TokenLogprobs | None]]],
    replayed: bool = False,
    shared_prefix: bool = False,
) -> Collect:
    """Bring `[2, len(requests)]` tokens and failures to the host, without waiting for them."""
    arrived = None
    if results.is_cuda:
        on_host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        results = on_host.copy_(results, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

    def collect() -> StepResult:
        if arrived is not None:
            arrived.synchronize()
        tokens, failed = results.tolist()
        return StepResult(
            [
                Sampled(request, token, None, bool(failure))
                for request, token, failure in zip(requests, tokens, failed, strict=True)
            ],
            prompts,
            replayed,
            shared_prefix,
        )

    return collect


def joined(results: list[StepResult]) -> StepResult:
    """The results of a plan that ran in parts."""
    return StepResult(
        [sampled for result in results for sampled in result.sampled],
        [prompt for result in results for prompt in result.prompt_logprobs],
        all(result.replayed for result in results),
        any(result.shared_prefix for result in results),
    )
