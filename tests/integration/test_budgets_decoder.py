"""Budgets of pages with real attention, against transformers told by a mask who sees what.

Positions stay those in the text, so a mask over the whole text is all that a drop policy is.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from memd.engine.attention_shares import HALF_LIFE_STEPS
from memd.engine.messages import SamplingParams, StepReport, Submit
from memd.evaluate.compare import compare
from memd.evaluate.policy import KVPolicy
from memd.pool.sequence import PoolSequence
from memd.types import DropPolicy

from .test_decoder import make_model, random_tokens
from .test_long_context import Inline

PAGE = 16
PAGES = 8
CPU = torch.device("cpu")


def masked(model: Any, tokens: list[int], seen: Tensor) -> Any:
    """What transformers makes of a text whose token i sees `seen[i]`, [T, T] bool."""
    mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)[None, None]
    with torch.inference_mode():
        return model(torch.tensor([tokens]), attention_mask=mask, output_attentions=True)


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def by_recency(length: int, pages: int, sink_pages: int) -> Tensor:
    """Beyond the budget a quarter of what is no sink goes at once, the oldest first."""
    seen = causal(length)
    segment = max(1, (pages - sink_pages) // 4) * PAGE
    for token in range(pages * PAGE, length):
        gone = ((token - pages * PAGE) // segment + 1) * segment
        seen[token, sink_pages * PAGE : sink_pages * PAGE + gone] = False
    return seen


@pytest.mark.parametrize(
    ("name", "sinks", "chunk"), [("llama", 4, 512), ("llama-llama3", 40, 50), ("qwen3", 4, 50)]
)
def test_by_recency_through_the_engine(name: str, sinks: int, chunk: int) -> None:
    model, config, decoder = make_model(name)
    settings = "kv.budget=128", f"kv.sinks={sinks}", f"engine.max_batch_tokens={chunk}"
    inline = Inline(config, decoder, *settings)
    prompt = random_tokens(260)
    generated, logprobs = inline.generate(prompt, 40, prompt_logprobs=0)
    assert inline.most_pages == PAGES
    text = prompt + generated
    logits = masked(model, text, by_recency(len(text), PAGES, -(-sinks // PAGE))).logits[0]
    assert generated == logits[259:-1].argmax(-1).tolist()
    expected = logits.log_softmax(-1)[range(259), prompt[1:]]
    torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-3, atol=1e-3)


def test_by_attention_share_through_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is that of the pages that were held; the shares are those of transformers."""
    model, config, decoder = make_model("llama")
    inline = Inline(config, decoder, "kv.budget=128", "kv.drop_policy=attention_share")
    prompt, count = random_tokens(100), 60
    inline._port.post(Submit("one", prompt, SamplingParams(1, max_tokens=count, temperature=0.0)))
    numbers: list[int] = []  # of the pages held, by their place in the text
    remove = inline.engine.pool.retention._remove

    def spy(sequence: PoolSequence, victims: list[int], policy: DropPolicy) -> None:
        for index in reversed(victims):
            del numbers[index]
        remove(sequence, victims, policy)

    monkeypatch.setattr(inline.engine.pool.retention, "_remove", spy)
    seen, shares = causal(len(prompt) + count), []
    generated: list[int] = []
    while len(generated) < count:
        inline.engine.step()
        sequence = inline.engine.pool.sequences.get("one")  # type: ignore[call-overload]
        if sequence is not None:
            new = len(sequence.pages) - len(numbers)
            numbers += range(sequence.span_pages - new, sequence.span_pages)
            at = len(prompt) + len(generated) - 1
            if generated:
                kept = torch.tensor([number in numbers for number in range(at // PAGE + 1)])
                seen[at, : at + 1] &= kept.repeat_interleave(PAGE)[: at + 1]
            if sequence.dropped_pages == 0:
                shares = sequence.shares
        for message in inline._port.take():
            assert isinstance(message, StepReport)
            for output in message.outputs:
                assert output.error is None
                generated += output.token_ids
    dropped = inline.engine.snapshot().pool.dropped_pages
    assert dropped["attention_share"] == math.ceil((100 + count - 1) / PAGE) - PAGES
    last = len(prompt) + count - 2  # computed by the step that ended the sequence
    seen[last, :last] = seen[last - 1, :last]
    assert not seen[last, PAGE : 6 * PAGE].all()
    found = masked(model, prompt + generated, seen)
    logits = found.logits[0]
    assert generated == logits[99:-1].argmax(-1).tolist()
    # The first shares, of token 100 to the last full reading before anything was let go.
    weights = torch.stack(found.attentions)[:, 0].mean((0, 1))  # [T, T]
    mean = weights[100:124, : PAGES * PAGE].unflatten(1, (PAGES, PAGE)).sum(2).mean(0)
    measured = torch.tensor(shares[:6])
    torch.testing.assert_close(measured, mean[:6], rtol=0.2, atol=0.03)


def test_measured_as_text_that_is_generated() -> None:
    """`memd eval` drops what the attention of transformers says, averaged in the same way."""
    model, config, decoder = make_model("llama")
    tokens, pages, sink_pages = random_tokens(300), 6, 1
    seen = causal(len(tokens))
    held = list(range(pages))
    shares: dict[int, float] = {}
    for page in range(math.ceil(len(tokens) / PAGE)):
        if page >= pages:
            recent = (pages - sink_pages) // 2
            victim = min(held[sink_pages : len(held) - recent], key=shares.__getitem__)
            held = [number for number in held if number != victim] + [page]
        stop = min((page + 1) * PAGE, len(tokens))
        for number in range(page):
            if number not in held:
                seen[page * PAGE : stop, number * PAGE : (number + 1) * PAGE] = False
        weights = torch.stack(masked(model, tokens[:stop], seen[:stop, :stop]).attentions)
        found = weights[:, 0].mean((0, 1))[page * PAGE :].sum(0)
        kept = 0.5 ** ((stop - page * PAGE) / HALF_LIFE_STEPS)
        for number in held[: page + 1]:
            share = found[number * PAGE : (number + 1) * PAGE].sum().item() / found.sum().item()
            shares[number] = kept * shares.get(number, share) + (1 - kept) * share
    logits = masked(model, tokens, seen).logits[0].log_softmax(-1)
    nats = -logits[range(299), tokens[1:]].double().sum().item()
    policy = KVPolicy(sinks=4, budget=pages * PAGE, drop="attention_share")
    plain = KVPolicy(sinks=4, budget=pages * PAGE)
    _, by_share, oldest = compare(
        decoder, config, tokens, [policy, plain], PAGE, torch.float32, CPU
    )
    assert by_share.nats == pytest.approx(nats, rel=1e-4)
    logits = masked(model, tokens, by_recency(300, pages, sink_pages)).logits[0].log_softmax(-1)
    nats = -logits[range(299), tokens[1:]].double().sum().item()
    assert oldest.nats == pytest.approx(nats, rel=1e-4)
    assert by_share.nats != pytest.approx(oldest.nats, rel=1e-3)
