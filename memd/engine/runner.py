"""Runs a step plan on the device: copies, forward pass, sampling."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from memd_kernels import reference as kernels

from memd.engine.batch import PromptRows, StepBatch, build_batch
from memd.engine.messages import TokenLogprobs
from memd.engine.request import Request
from memd.engine.sampling import Sampled, Vocabulary, sample_tokens, token_logprobs
from memd.engine.scheduler import StepPlan
from memd.models.decoder import ForwardBatch
from memd.pool.layout import KVLayout

Forward = Callable[[ForwardBatch, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    """What a step produced: next tokens, and log-probabilities of prompt tokens where asked for."""

    sampled: list[Sampled]
    prompt_logprobs: list[tuple[Request, list[TokenLogprobs | None]]]


class Runner:
    """The only code that touches the device during a step.

    Args:
        forward: The model: `(batch, kv) -> logits [rows, vocab]`, float32.
        kv: All pages (see `memd.arena.arena.Arena.kv`).
        layout: Byte arithmetic of `kv`.
        vocabulary: Ids that may be sampled.
        device: Where `kv` and the weights are.
    """

    def __init__(
        self,
        forward: Forward,
        kv: torch.Tensor,
        layout: KVLayout,
        vocabulary: Vocabulary,
        device: torch.device,
    ) -> None:
        self.vocabulary = vocabulary
        self._forward = forward
        self._kv = kv
        self._layout = layout
        self._device = device

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan. Doing it again gives the same result: it writes the same KV."""
        with torch.inference_mode():
            batch = build_batch(plan, self._layout, self._device)
            self._copy(batch)
            logits = self._forward(batch.forward, self._kv)
            prompts = [
                (rows.request, self._prompt_logprobs(logits, rows)) for rows in batch.prompts
            ]
            sampling = [
                (row, request)
                for row, request in zip(batch.sampled_rows, batch.sampled, strict=True)
                if request.sampling.max_tokens
            ]
            if not sampling:
                return StepResult([], prompts)
            rows, requests = map(list, zip(*sampling, strict=True))
            if len(rows) != len(logits):
                logits = logits[rows]
            return StepResult(sample_tokens(logits, requests, self.vocabulary), prompts)

    def _copy(self, batch: StepBatch) -> None:
        if batch.copies:
            kernels.copy_page_tokens(
                self._kv,
                [copy.source for copy in batch.copies],
                [copy.target for copy in batch.copies],
                [copy.num_tokens for copy in batch.copies],
            )

    def _prompt_logprobs(
        self, logits: torch.Tensor, rows: PromptRows
    ) -> list[TokenLogprobs | None]:
        """For each prompt position of the rows, the log-probability of the token there.

        A position's logits tell of the token after it; so the first row also stands for the token
        before it, which nothing predicts if it is the prompt's first.
        """
        request = rows.request
        predicted = list(request.tokens[rows.position + 1 : rows.position + rows.count + 1])
        predicted = predicted[: request.prompt_length - rows.position - 1]
        found: list[TokenLogprobs | None] = [None] if rows.position == 0 else []
        if predicted:
            found += token_logprobs(
                logits[rows.row : rows.row + len(predicted)],
                torch.tensor(predicted, device=logits.device),
                [request.sampling.prompt_logprobs or 0] * len(predicted),
                self.vocabulary,
            )
        return found
