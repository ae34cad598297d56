"""The guard: what packing loses, and what is said about it."""

import dataclasses
from pathlib import Path

import pytest
import tiny
import torch
from memd_kernels.formats import FormatName, PackedFormat

from memd.evaluate.guard import HeadLoss, Verdict, check_packing, judge, measure_losses
from memd.models.checkpoint import load_tensors
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder
from memd.models.hub import read_config, resolve

CPU = torch.device("cpu")
LAYERS = 2
CHANNEL = 3  # of the outlier that is planted


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("models") / "tiny", num_layers=LAYERS)


def load(directory: Path, outlier: float = 1.0) -> tuple[Decoder, ModelConfig]:
    """The model; in its last layer a pair of channels that turn together is `outlier` times larger
    in keys and as much smaller in queries, which changes no score.
    """
    files = resolve(str(directory))
    config = read_config(files)
    tensors = load_tensors(files, config, torch.float32, CPU)
    dim = config.head_dim
    for channel in (CHANNEL, CHANNEL + dim // 2):
        tensors[f"layers.{LAYERS - 1}.self_attn.k_proj.weight"][channel] *= outlier
        queries = tensors[f"layers.{LAYERS - 1}.self_attn.q_proj.weight"]
        queries.view(config.num_heads, dim, -1)[:, channel] /= outlier
    return Decoder(config, tensors, CPU), config


def verdict(directory: Path, kv: FormatName, outlier: float, page_tokens: int = 16) -> Verdict:
    decoder, config = load(directory, outlier)
    packed = PackedFormat(kv, page_tokens, config.head_dim)
    return check_packing(decoder.forward, config, packed, torch.float32, CPU)


@pytest.mark.parametrize("kv", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_a_usual_model_is_let_in(directory: Path, kv: FormatName, page_tokens: int) -> None:
    found = verdict(directory, kv, 1.0, page_tokens)
    assert found.format == kv
    assert found.refusal is None
    assert found.warnings == []
    assert 0 < found.worst_error < {"int8": 0.02, "int4": 0.2, "fp8": 0.05}[kv]


@pytest.mark.parametrize("outlier", [16.0, 200.0])
def test_outlier_key_channels_are_warned_about_for_int4(directory: Path, outlier: float) -> None:
    eight = verdict(directory, "int8", outlier)
    assert eight.worst_error < 0.02
    assert (eight.refusal, eight.warnings) == (None, [])
    four = verdict(directory, "int4", outlier)
    assert four.refusal is None
    (warning,) = four.warnings
    assert warning.startswith(f"1 of {LAYERS} KV heads")
    assert f"of layer {LAYERS - 1}, head 0" in warning
    assert any(f"channel {channel} of" in warning for channel in (CHANNEL, CHANNEL + 8))


def test_losses_are_told_for_each_layer_and_head(directory: Path) -> None:
    decoder, config = load(directory)
    packed = PackedFormat("int4", 16, config.head_dim)
    losses = measure_losses(decoder.forward, config, packed, torch.float32, CPU)
    assert [(loss.layer, loss.head) for loss in losses] == [(0, 0), (1, 0)]
    assert all(0.01 < loss.keys < 0.2 and 0.01 < loss.values < 0.2 for loss in losses)


def test_a_model_without_a_second_page_packs_nothing(directory: Path) -> None:
    decoder, config = load(directory)
    short = dataclasses.replace(config, max_position=20)
    found = check_packing(
        decoder.forward, short, PackedFormat("int8", 16, config.head_dim), torch.float32, CPU
    )
    assert found == Verdict("int8", 0.0)


def test_keys_that_are_no_numbers_are_refused(directory: Path) -> None:
    found = verdict(directory, "int8", float("nan"))
    assert found.worst_error == float("inf")
    assert found.refusal is not None


def loss(keys: float, values: float, spread: float = 1.0) -> HeadLoss:
    return HeadLoss(layer=4, head=2, keys=keys, values=values, channel=7, spread=spread)


@pytest.mark.parametrize(
    ("kv", "keys", "values", "part"),
    [("int8", 0.021, 0.003, "keys"), ("int8", 0.001, 0.03, "values"), ("int4", 0.3, 0.1, "keys")],
)
def test_too_large_an_error_is_refused(
    kv: FormatName, keys: float, values: float, part: str
) -> None:
    found = judge(kv, [loss(0.001, 0.001), loss(keys, values)])
    assert found.refusal == (
        f"packed in {kv}, {part} of layer 4, KV head 2 are {max(keys, values):.1%} off, "
        f"more than {'2%' if kv == 'int8' else '20%'}"
    )


def test_an_error_at_the_limit_is_let_in() -> None:
    assert judge("int8", [loss(0.02, 0.02)]).refusal is None


def test_outliers_are_no_matter_for_int8() -> None:
    assert judge("int8", [loss(0.01, 0.01, spread=100)]).warnings == []
    assert len(judge("int4", [loss(0.01, 0.01, spread=100)]).warnings) == 1
