"""What a token gets with `engine.batch_invariant` is the same bits in any company and any chunk."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import memd_kernels as kernels
import pytest
import tiny
import torch
from company import PROMPTS, Inline, alone
from torch import Tensor

from memd.engine.invariant import batch_invariant

from .test_decoder import Sequences, make_model, random_tokens

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    kernels.set_batch_invariant(False)


def computed(
    decoder: Any, config: Any, dtype: torch.dtype, chunk: int, company: bool
) -> tuple[Tensor, Tensor]:
    """Logits [40, vocab] of a text, 30 tokens in chunks and 10 one by one, and its pages."""
    text, other = random_tokens(40, seed=1), iter(random_tokens(200, seed=2))
    sequences = Sequences(config, decoder, 3, 80, dtype)
    logits = []
    for start in range(0, 30, chunk):
        decodes = {1: next(other)} if company else {}
        also = {2: [next(other), next(other)]} if company else {}
        step = sequences.step(decodes, {0: text[start : min(start + chunk, 30)], **also})
        logits.append(step[0])
    for at in range(30, 40):
        decodes = {1: next(other)} if company else {}
        logits.append(sequences.step({**decodes, 0: text[at]}, {})[0])
    pages = [sequences.kv[divmod(int(page), 3)] for page in sequences._table[0, :2]]
    return torch.cat(logits), torch.stack(pages)  # of the text's full pages


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-biases", torch.bfloat16),
        ("mistral-window", torch.float32),
        ("qwen3", torch.float16),
    ],
)
def test_bits_do_not_depend_on_company_or_chunks(name: str, dtype: torch.dtype) -> None:
    _, config, decoder = make_model(name, dtype)
    strict = SimpleNamespace(forward=batch_invariant(decoder.forward, True, CPU))
    with torch.inference_mode():
        expected, kv = computed(strict, config, dtype, 30, company=False)
        for chunk in (7, 16):
            logits, pages = computed(strict, config, dtype, chunk, company=True)
            assert torch.equal(logits, expected)
            assert torch.equal(pages, kv)
        # It is the same model: only rounding is another than that of a pass over many tokens.
        plain, _ = computed(decoder, config, dtype, 30, company=False)
    limit = {torch.bfloat16: 0.2, torch.float16: 0.03, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(plain, expected, rtol=limit, atol=limit)


SEEDED = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 24}


@pytest.mark.parametrize("more", [{}, SEEDED], ids=["greedy", "seeded"])
def test_c072_bfloat16_texts_with_the_option(tmp_path: Path, more: dict[str, Any]) -> None:
    """Alone; together and cached; in small chunks and preempted: 20 prompts, the same tokens."""
    option = ("model.dtype=bfloat16", "engine.batch_invariant=true")
    model = tiny.write_model(tmp_path / "model", num_layers=2)
    inline = Inline(model, *option)
    expected = alone(inline, **more)
    assert all(len(text) == more.get("max_tokens", 64) for text in expected.values())
    inline.run(PROMPTS, **more)  # on what is cached
    assert inline.texts == expected
    fresh = Inline(model, *option, "engine.max_batch_tokens=16")
    fresh.run(PROMPTS, preempt=True, **more)
    assert fresh.engine.snapshot().preemptions > 0
    assert fresh.texts == expected


def test_c072_bfloat16_texts_without_it(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Some may differ, within rounding of bfloat16; how many is told at the end of the run."""
    model = tiny.write_model(tmp_path / "model", num_layers=2)
    inline = Inline(model, "model.dtype=bfloat16")
    expected = alone(inline)
    fresh = Inline(model, "model.dtype=bfloat16")
    fresh.run(PROMPTS)
    differing = sum(fresh.texts[name] != text for name, text in expected.items())
    record_property(
        "table", f"{differing} of 20 greedy texts differ in bfloat16 without the option"
    )
    assert differing <= 2
