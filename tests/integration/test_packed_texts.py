"""What a real decoder says over packed pages in the engine: as over full ones, or nearly."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny
import torch
import toy
from packed_toy import PackedHarness
from toy import Harness

from memd.errors import SettingsError
from memd.evaluate.guard import MOST_ERROR
from memd.models.checkpoint import load_tensors
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder, ForwardBatch
from memd.models.hub import read_config, resolve

CPU = torch.device("cpu")
PROMPT = [(7 * index * index + 3 * index) % 256 for index in range(200)]


@dataclass
class Recorder:
    """A decoder that remembers the logits of sequences that run alone."""

    decoder: Decoder
    logits: list[torch.Tensor] = field(default_factory=list)
    computed_tokens: int = 0

    def forward(self, batch: ForwardBatch, kv: torch.Tensor, packed: Any = None) -> torch.Tensor:
        self.computed_tokens += len(batch.token_ids)
        logits = self.decoder.forward(batch, kv, packed)
        self.logits.append(logits)
        return logits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Decoder]:
    files = resolve(str(tiny.write_model(tmp_path_factory.mktemp("models") / "tiny", 2)))
    config = read_config(files)
    return config, Decoder(config, load_tensors(files, config, torch.float32, CPU), CPU)


def engine_of(
    kind: type[Harness], model: tuple[ModelConfig, Decoder], *settings: str, **more: Any
) -> Harness:
    made = type(kind.__name__, (kind,), {"config": model[0]})
    recorder = Recorder(model[1])
    engine: Harness = made(*settings, model=recorder, vocab_limit=tiny.VOCABULARY, **more)
    recorder.logits.clear()
    return engine


def greedy(engine: Harness, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """The text, and the logits that each of its tokens was chosen by."""
    engine.model.logits.clear()
    tokens = engine.generate(prompt, count, ignore_eos=True)
    rows = [each for each in engine.model.logits if len(each)]
    return tokens, torch.cat(rows)


@pytest.mark.parametrize(("form", "most"), [("int8", 0.05), ("fp8", 0.25), ("int4", 1.0)])
def test_c063_a_prompt_cold_and_warm(
    model: tuple[ModelConfig, Decoder], form: str, most: float
) -> None:
    engine = engine_of(PackedHarness, model, form=form)
    cold, cold_logits = greedy(engine, PROMPT, 64)
    assert engine.packed > 10
    computed = engine.model.computed_tokens
    warm, warm_logits = greedy(engine, PROMPT, 64)
    assert engine.model.computed_tokens - computed < 80, "the prompt is a hit"
    same = next((at for at in range(64) if cold[at] != warm[at]), 63) + 1
    assert (cold_logits[:same] - warm_logits[:same]).abs().max() < most
    if form == "int8":
        assert cold == warm


@pytest.mark.parametrize(("form", "most"), [("int8", 0.05), ("int4", 1.0)])
def test_greedy_text_over_packed_pages_is_that_over_full_ones(
    model: tuple[ModelConfig, Decoder], form: str, most: float
) -> None:
    full, full_logits = greedy(engine_of(Harness, model), PROMPT, 100)
    engine = engine_of(PackedHarness, model, form=form)
    packed, packed_logits = greedy(engine, PROMPT, 100)
    assert engine.packed > 12
    same = next((at for at in range(100) if full[at] != packed[at]), 99) + 1
    difference = (full_logits[:same] - packed_logits[:same]).abs().max()
    assert 0 < difference < most
    if form == "int8":
        assert full == packed


def test_a_small_pool_says_what_a_large_one_says_where_chunks_are_the_same(
    model: tuple[ModelConfig, Decoder],
) -> None:
    """One sequence at a time is cut alike in both, and evictions do not change what is packed."""
    prompts = [PROMPT[:150], PROMPT[40:190], PROMPT[:150], PROMPT[10:140]]
    texts = []
    for limit in ("1024 tokens", "320 tokens"):
        engine = engine_of(PackedHarness, model, f"memory.limit={limit}", "memory.host.limit=1MB")
        texts.append([engine.generate(prompt, 60, ignore_eos=True) for prompt in prompts])
        assert engine.packed > 20
    assert engine.engine.pool.counters.transfers["d2h", "ok"] > 5
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("form", "instead"), [("int4", "int8"), ("int8", "full")])
def test_a_model_that_the_format_would_ruin_is_refused_with_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, form: str, instead: str
) -> None:
    monkeypatch.setitem(MOST_ERROR, form, 1e-4)
    with pytest.raises(SettingsError) as caught:
        PackedHarness(form=form)
    assert list(caught.value.problems) == ["kv.format"]
    text = caught.value.problems["kv.format"]
    assert text.startswith(f"is {form}: packed in {form}, ")
    assert "% off, more than 0%" in text
    assert instead in text.rpartition("; set ")[2]


def test_a_head_that_no_page_can_be_packed_for_is_refused() -> None:
    with pytest.raises(SettingsError) as caught:
        type("Odd", (PackedHarness,), {"config": toy.CONFIG})(model=toy.ToyModel())
    assert caught.value.problems == {
        "kv.format": "is int8: head_dim is 2, must be a multiple of 8; full suits every model"
    }
