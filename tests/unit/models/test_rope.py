"""Rotary frequencies of every scaling."""

import pytest
import torch

from memd.errors import ModelError
from memd.models.config import ModelConfig, RopeScaling
from memd.models.rope import Rotary, inverse_frequencies

LLAMA3 = RopeScaling("llama3", factor=32.0, original_max_position=8192)
LLAMA3_VALUES = {
    0: 1.0,
    15: 0.00129054793,
    16: 0.000429556797,
    18: 1.94616382e-5,
    31: 9.41830673e-8,
}


def make_config(scaling: RopeScaling | None, theta: float = 5e5, rope_dim: int = 64) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=8,
        hidden_size=64,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        max_position=131072,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        rope_scaling=scaling,
        rope_dim=rope_dim,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_embeddings=True,
        windows=(None,),
        dtype="float32",
    )


def frequencies(scaling: RopeScaling | None) -> torch.Tensor:
    return inverse_frequencies(make_config(scaling))[0]


def test_plain_frequencies() -> None:
    inverse, attention_factor = inverse_frequencies(make_config(None, theta=100.0, rope_dim=4))
    torch.testing.assert_close(inverse, torch.tensor([1.0, 0.1]))
    assert attention_factor == 1.0


def test_llama3() -> None:
    inverse, attention_factor = inverse_frequencies(make_config(LLAMA3))
    assert {i: inverse[i].item() for i in LLAMA3_VALUES} == pytest.approx(LLAMA3_VALUES, rel=1e-6)
    assert attention_factor == 1.0


def test_frequency_factors_of_gguf_give_the_same() -> None:
    factors = tuple((frequencies(None) / frequencies(LLAMA3)).tolist())
    inverse = frequencies(RopeScaling("factors", factors=factors))
    assert {i: inverse[i].item() for i in LLAMA3_VALUES} == pytest.approx(LLAMA3_VALUES, rel=1e-6)


def test_linear_divides_positions() -> None:
    config = make_config(RopeScaling("linear", factor=4.0))
    scaled = Rotary(config, torch.device("cpu")).angles(torch.tensor([4, 400, 9000]))
    plain = Rotary(make_config(None), torch.device("cpu")).angles(torch.tensor([1, 100, 2250]))
    for actual, expected in zip(scaled, plain, strict=True):
        assert torch.equal(actual, expected)


def test_yarn_keeps_fast_dimensions_and_stretches_slow_ones() -> None:
    scaling = RopeScaling("yarn", factor=4.0, original_max_position=4096)
    inverse, attention_factor = inverse_frequencies(make_config(scaling))
    plain = frequencies(None)
    assert attention_factor == pytest.approx(1.138629, rel=1e-6)
    torch.testing.assert_close(inverse[:5], plain[:5])
    torch.testing.assert_close(inverse[-5:], plain[-5:] / 4)
    cos, _ = Rotary(make_config(scaling), torch.device("cpu")).angles(torch.tensor([0]))
    assert cos[0, 0].item() == pytest.approx(attention_factor)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.277258872 / 1.138629436),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_attention_factor(changes: dict[str, float], expected: float) -> None:
    scaling = RopeScaling("yarn", **{"factor": 4.0, "original_max_position": 4096, **changes})
    _, attention_factor = inverse_frequencies(make_config(scaling))
    assert attention_factor == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (RopeScaling("dynamic", factor=2.0), "'dynamic'"),
        (RopeScaling("yarn", factor=2.0), "original_max_position_embeddings"),
        (RopeScaling("llama3", factor=2.0), "original_max_position_embeddings"),
        (RopeScaling("factors", factors=(1.0, 2.0)), "2 frequency factors, the model needs 32"),
    ],
)
def test_what_is_not_known_is_refused(scaling: RopeScaling, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        inverse_frequencies(make_config(scaling))
