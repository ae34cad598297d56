"""What is sampled and reported of half-precision logits is that of the same values in float32."""

from typing import Any

import torch
from memd_kernels.formats import PackedPages
from toy import Harness, ToyModel

from memd.models.decoder import ForwardBatch

REQUESTS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_p": 0.9, "top_k": 20},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 0},
    {"logit_bias": {3: 0.013}, "presence_penalty": 0.11, "min_tokens": 5},
]


class Half(ToyModel):
    """Its logits are in bfloat16."""

    def forward(
        self, batch: ForwardBatch, kv: torch.Tensor, packed: PackedPages | None = None
    ) -> torch.Tensor:
        return super().forward(batch, kv, packed).to(torch.bfloat16)


class Rounded(Half):
    """Its logits are the same, in float32."""

    def forward(
        self, batch: ForwardBatch, kv: torch.Tensor, packed: PackedPages | None = None
    ) -> torch.Tensor:
        return super().forward(batch, kv, packed).float()


def told(model: ToyModel) -> list[object]:
    """Tokens and log-probabilities of each request."""
    harness = Harness(model=model)
    ids = [harness.submit([5, 6, 7, index], 12, **more) for index, more in enumerate(REQUESTS)]
    harness.finish()
    return [
        (output.token_ids, output.logprobs, output.prompt_logprobs)
        for request_id in ids
        for output in harness.outputs[request_id]
    ]


def test_logits_in_half_precision() -> None:
    assert told(Half()) == told(Rounded())
