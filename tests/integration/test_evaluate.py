"""`memd eval`'s measurements on a tiny model: the same predictions however they are computed."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import tiny
import torch

from memd.config import Settings
from memd.config_sources import load
from memd.errors import ModelError, RequestError
from memd.evaluate.compare import Quality, compare
from memd.evaluate.policy import KVFormat, KVPolicy
from memd.evaluate.report import evaluate
from memd.evaluate.sequence import PagedSequence
from memd.models.checkpoint import load_tensors
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder
from memd.models.hub import read_config, resolve

CPU = torch.device("cpu")
PAGE_TOKENS = 16
NUM_TOKENS = 269
IDS = [(7 * index * index + 3 * index) % 256 for index in range(NUM_TOKENS)]
TEXT = "The pages of a sequence are packed when nobody looks at them closely any more. " * 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("models") / "tiny", 2, max_position=1000)


@lru_cache(maxsize=1)
def load_model(directory: Path) -> tuple[Decoder, ModelConfig]:
    files = resolve(str(directory))
    config = read_config(files)
    return Decoder(config, load_tensors(files, config, torch.float32, CPU), CPU), config


def logits(
    directory: Path, policy: KVPolicy, chunk: int, decoding: bool = False
) -> tuple[torch.Tensor, PagedSequence]:
    """Of all positions, computed in chunks; by the attention of decoding if so wished."""
    decoder, config = load_model(directory)
    if policy.window is not None:
        decoder = decoder.with_window(policy.window, policy.sinks)
    sequence = PagedSequence(config, policy, PAGE_TOKENS, NUM_TOKENS, torch.float32, CPU)
    ids, found = torch.tensor(IDS), []
    with torch.inference_mode():
        for start in range(0, NUM_TOKENS, chunk):
            batch = sequence.chunk(ids[start : start + chunk], start)
            if decoding:
                batch = replace(batch, num_decodes=1, query_starts=batch.query_starts[:1])
            found.append(decoder.forward(batch, sequence.kv, sequence.packed))
    return torch.cat(found), sequence


@pytest.mark.parametrize(
    ("kv", "chunk", "decoding"), [("int8", 16, False), ("int4", 1, True), ("fp8", 32, False)]
)
def test_c063_predictions_do_not_depend_on_chunks(
    directory: Path, kv: KVFormat, chunk: int, decoding: bool
) -> None:
    policy = KVPolicy(kv, full_precision_tokens=20, recent_tokens=30)
    expected, sequence = logits(directory, policy, 64)
    assert sum(map(len, sequence.errors)) == 12  # pages within 256 - 30 tokens, but the first two
    full, _ = logits(directory, KVPolicy(), 64)
    found, _ = logits(directory, policy, chunk, decoding)
    difference = (found - expected).abs().max()
    assert difference < 1e-3
    # Packing shows, or this would prove nothing.
    assert difference < (expected - full).abs().max() / 3


@pytest.mark.parametrize(("kv", "sinks"), [("full", 0), ("full", 20), ("int4", 20)])
def test_pages_behind_a_window_are_given_back(directory: Path, kv: KVFormat, sinks: int) -> None:
    policy = KVPolicy(kv, full_precision_tokens=0, recent_tokens=16, window=80, sinks=sinks)
    found, sequence = logits(directory, policy, 64)
    pages = sequence.kv.shape[1] + (sequence.packed.num_pages if sequence.packed else 0)
    assert pages < 16 < NUM_TOKENS / PAGE_TOKENS
    if kv == "full":
        decoder, config = load_model(directory)
        whole = PagedSequence(config, KVPolicy(), PAGE_TOKENS, NUM_TOKENS, torch.float32, CPU)
        with torch.inference_mode():
            expected = decoder.with_window(80, sinks).forward(
                whole.chunk(torch.tensor(IDS), 0), whole.kv
            )
        assert torch.allclose(found, expected, atol=1e-4)


def test_pages_are_no_more_than_the_accounts_say(directory: Path) -> None:
    policy = KVPolicy("int8", full_precision_tokens=20, recent_tokens=30)
    _, sequence = logits(directory, policy, 64)
    assert sequence.packed is not None
    assert sequence.packed.num_pages == len(policy.packed_pages(PAGE_TOKENS, 256)) == 12
    # Two are never packed, two are recent, and four are being written.
    assert sequence.kv.shape[1] == 8


def test_packing_costs_little_and_the_coarser_format_more(directory: Path) -> None:
    decoder, config = load_model(directory)
    policies = [KVPolicy(), KVPolicy("int8", 16, 16), KVPolicy("int4", 16, 16)]
    full, same, int8, int4 = compare(
        decoder, config, IDS, policies, PAGE_TOKENS, torch.float32, CPU
    )
    assert same is full
    assert full.predicted == NUM_TOKENS - 1
    assert full.agreed == full.predicted
    assert full.divergence == 0
    assert 0 < int8.divergence < int4.divergence < 0.01 * full.predicted
    assert int8.perplexity == pytest.approx(full.perplexity, rel=1e-2)
    assert torch.cat(list(int8.packing_errors)).max() < 0.02
    assert torch.cat(list(int4.packing_errors)).min() > 0.02


def test_quality_by_hand() -> None:
    quality = Quality()
    full = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    found = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    quality.add(found, full, torch.tensor([0, 1]))
    assert quality.perplexity == pytest.approx((4 / 0.8) ** 0.5)
    assert (quality.agreed, quality.predicted) == (1, 2)
    assert quality.divergence == pytest.approx(0.25 * torch.tensor(2.0).log().item())


def settings(directory: Path) -> Settings:
    assignments = [f"model.path={directory}", "engine.threads=1", "memory.page_tokens=16"]
    return load(assignments=assignments, environment={})


def text(tmp_path: Path, content: str = TEXT) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(content, encoding="utf-8")
    return path


def test_a_report(directory: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    policies = [KVPolicy(), KVPolicy("int8", 32, 32), KVPolicy("full", window=100)]
    report = evaluate(
        settings(directory), text(tmp_path), 400, policies, lambda *done: seen.append(done)
    )
    assert (report["model"], report["tokens"], report["dtype"]) == ("tiny", 400, "float32")
    assert seen[-1] == (400, 400)
    full, int8, windowed = report["rows"]
    token_bytes = 2 * 2 * 16 * 4  # layers, K and V, head dim, float32
    assert full["perplexity"] == report["full"]["perplexity"]
    assert full["kv_bytes"] == report["full"]["kv_bytes"] == 400 * token_bytes
    assert (full["rise"], full["agreement"], full["ratio"]) == (0, 1, 1)
    assert full["worst_error"] is None
    assert (int8["full_pages"], int8["packed_pages"]) == (5, 20)
    assert int8["ratio"] > int8["bfloat16_ratio"] > 1
    assert int8["rise"] == pytest.approx(int8["perplexity"] / full["perplexity"] - 1)
    assert 0 < int8["key_error"] <= int8["worst_error"] < 0.02
    assert 0 < int8["value_error"] <= int8["worst_error"]
    assert windowed["window"] == 100
    assert windowed["full_pages"] == 7
    assert windowed["divergence"] > 0


def test_tokens_are_bounded_by_model_and_text(directory: Path, tmp_path: Path) -> None:
    path = text(tmp_path)
    with pytest.raises(RequestError, match="1001 is not from 2 to 1000") as caught:
        evaluate(settings(directory), path, 1001, [KVPolicy()])
    assert caught.value.param == "tokens"
    with pytest.raises(RequestError, match="has 5 tokens, 6 are needed") as caught:
        evaluate(settings(directory), text(tmp_path, "words"), 6, [KVPolicy()])
    assert caught.value.param == "text"
    with pytest.raises(RequestError, match="has 0 tokens, 2 are needed"):
        evaluate(settings(directory), text(tmp_path, ""), None, [KVPolicy()])
    report = evaluate(settings(directory), text(tmp_path, "words"), None, [KVPolicy()])
    assert report["tokens"] == 5


def test_a_text_that_is_no_text(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="cannot be read as UTF-8"):
        evaluate(settings(directory), path, None, [KVPolicy()])


def test_a_model_without_a_tokenizer(directory: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((directory / name).read_bytes())
    with pytest.raises(ModelError, match="bare has no tokenizer"):
        evaluate(settings(bare), text(tmp_path), 100, [KVPolicy()])
