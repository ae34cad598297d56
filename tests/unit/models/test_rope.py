"""Rotary frequencies of every scaling."""

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from memd.errors import ModelError
from memd.models.config import ModelConfig, RopeScaling
from memd.models.hf_config import from_hf
from memd.models.rope import Rotary, inverse_frequencies, stretched

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


def hf_config(rope: dict[str, Any], head_dim: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=64,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=64 // head_dim,
        max_position_embeddings=8192,
        rope_theta=5e5,
        rope_scaling=rope,
    )


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 10 for i in range(16)],
    "long_factor": [1.5 + i * i for i in range(16)],
}


@pytest.mark.parametrize(
    ("rope", "head_dim"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 64),
        ({"rope_type": "dynamic", "factor": 1.0}, 32),
        ({"rope_type": "dynamic", "factor": 2.5, "rope_theta": 1e4}, 32),
        ({**LONGROPE, "original_max_position_embeddings": 2048}, 32),
        ({**LONGROPE, "original_max_position_embeddings": 2048, "factor": 32.0}, 32),
        ({**LONGROPE, "original_max_position_embeddings": 2048, "attention_factor": 1.25}, 32),
        (LONGROPE, 32),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 64),
    ],
)
@pytest.mark.parametrize("length", [1, 2047, 2048, 2049, 8191, 8192, 8193, 20000])
def test_c099_frequencies_are_those_of_transformers(
    rope: dict[str, Any], head_dim: int, length: int
) -> None:
    """Where they depend on a length: those of transformers for the longest text served."""
    reference = hf_config(dict(rope), head_dim)
    config = from_hf(reference.to_dict())
    served = min(length, config.max_position)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
        reference, torch.device("cpu"), seq_len=served
    )
    inverse, found = inverse_frequencies(stretched(config, length))
    torch.testing.assert_close(inverse, expected, rtol=2e-6, atol=0)
    assert found == pytest.approx(attention_factor)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_one_engine_has_one_set_of_frequencies(kind: str) -> None:
    """Cached keys are shared by texts of all lengths, so none of them may change it."""
    scaling = {
        "dynamic": RopeScaling("dynamic", 4.0, 32768),
        "longrope": RopeScaling(
            "longrope", 4.0, 32768, short_factors=(1.0,) * 32, long_factors=(4.0,) * 32
        ),
    }[kind]
    config = make_config(scaling)
    rotary = Rotary(config, torch.device("cpu"))
    alone = rotary.angles(torch.tensor([9]))
    beside = rotary.angles(torch.tensor([100_000, 9]))
    for one, two in zip(alone, beside, strict=True):
        assert torch.equal(one[0], two[1])
    assert stretched(config, "auto") == config  # for the longest
    longest, _ = inverse_frequencies(stretched(config, 131072))
    assert torch.equal(longest, inverse_frequencies(config)[0])
    plain, _ = inverse_frequencies(make_config(None))
    assert torch.equal(inverse_frequencies(stretched(config, 32768))[0], plain)
    assert not torch.equal(longest, plain)
    assert stretched(make_config(LLAMA3), 4096) == make_config(LLAMA3)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (RopeScaling("ntk", factor=2.0), "'ntk'"),
        (RopeScaling("dynamic", factor=2.0), "original_max_position_embeddings"),
        (RopeScaling("longrope", 2.0, 4096), "0 short factors, the model needs 32"),
        (RopeScaling("yarn", factor=2.0), "original_max_position_embeddings"),
        (RopeScaling("llama3", factor=2.0), "original_max_position_embeddings"),
        (RopeScaling("factors", factors=(1.0, 2.0)), "2 frequency factors, the model needs 32"),
    ],
)
def test_what_is_not_known_is_refused(scaling: RopeScaling, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        inverse_frequencies(make_config(scaling))
