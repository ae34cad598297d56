"""Case C072 on a CUDA device: texts in half precision do not depend on company."""

from collections.abc import Iterator
from pathlib import Path

import memd_kernels as kernels
import pytest
import tiny
import torch
from company import PROMPTS, Inline, alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    kernels.set_batch_invariant(False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "seeded"])
def test_c072_texts_with_the_option(tmp_path: Path, dtype: str, more: dict[str, float]) -> None:
    option = (
        *(f"model.dtype={dtype}", "engine.device=cuda", "engine.batch_invariant=true"),
        # A page of this model has 2 KiB: a pool of most of the card would be 60 million of them.
        *("memory.limit=65536 tokens", "memory.host.limit=0", "engine.max_sequences=32"),
    )
    model = tiny.write_model(tmp_path / "model", num_layers=2)
    inline = Inline(model, *option)
    expected = alone(inline, **more)
    assert all(len(text) == 64 or text[-1] == tiny.END for text in expected.values())
    inline.run(PROMPTS, **more)  # on what is cached
    assert inline.texts == expected
    fresh = Inline(model, *option, "engine.max_batch_tokens=16")
    fresh.run(PROMPTS, preempt=True, **more)
    assert fresh.texts == expected
