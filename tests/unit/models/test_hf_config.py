"""config.json -> ModelConfig: every family, old and new spellings, and what is refused (C099)."""

from typing import Any

import pytest
import transformers

from memd.errors import ModelError
from memd.models.config import ModelConfig, RopeScaling
from memd.models.hf_config import from_hf

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "phi3": transformers.Phi3Config,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def written(family: str, **changes: Any) -> dict[str, Any]:
    """What transformers writes to config.json."""
    return CLASSES[family](**{**SIZES, **changes}).to_dict()


def bare(**changes: Any) -> dict[str, Any]:
    return {"model_type": "llama", **SIZES, **changes}


@pytest.mark.parametrize("family", CLASSES)
def test_what_transformers_writes(family: str) -> None:
    config = from_hf(written(family, head_dim=32, tie_word_embeddings=True))
    assert config.architecture == family
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert config.rope_dim == 32
    assert config.group_size == 2
    assert config.tie_embeddings
    assert config.qk_norm == (family == "qwen3")
    assert (config.attention_bias, config.output_bias) == (family == "qwen2", False)
    assert config.kv_bytes_per_token(2) == 4 * 2 * 2 * 32 * 2


@pytest.mark.parametrize("family", CLASSES)
def test_defaults_of_absent_keys_are_those_of_transformers(family: str) -> None:
    lean = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
    reference = CLASSES[family](**lean)
    config = from_hf({"model_type": family, **lean})
    assert config.max_position == reference.max_position_embeddings
    assert config.head_dim == (reference.head_dim if family == "qwen3" else 16)
    assert config.rope_theta == reference.rope_parameters["rope_theta"]
    assert config.rms_norm_eps == reference.rms_norm_eps
    window = reference.sliding_window if family == "mistral" else None
    assert config.windows == (window,) * 4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_biases_by_flag(family: str) -> None:
    config = from_hf(written(family, attention_bias=True))
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, True, False)
    assert from_hf(written("llama", mlp_bias=True)).mlp_bias


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_llama3_under_every_key(spelling: dict[str, Any]) -> None:
    config = from_hf(bare(**spelling))
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(
        "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0
    )


def test_linear_and_yarn() -> None:
    linear = from_hf(bare(rope_scaling={"type": "linear", "factor": 4}))
    assert linear.rope_scaling == RopeScaling("linear", 4.0)
    yarn = from_hf(bare(rope_scaling={"type": "yarn", "factor": 4.0, "truncate": False}))
    assert yarn.rope_scaling == RopeScaling("yarn", 4.0, 8192, truncate=False)
    stretched = from_hf(
        bare(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 2048})
    )
    assert stretched.rope_scaling == RopeScaling("yarn", 4.0, 2048)
    assert from_hf(bare(rope_scaling=None)).rope_scaling is None


def test_rope_whose_frequencies_follow_from_a_length() -> None:
    """C099: `dynamic` and `longrope`, by both spellings and in both places."""
    rope: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.5}
    for config in (
        bare(rope_scaling=rope),
        bare(rope_parameters={"rope_theta": 1e4, **rope}),
        bare(rope_scaling={"type": "dynamic", "factor": 2.5}),
    ):
        found = from_hf(config)
        assert found.rope_scaling == RopeScaling("dynamic", 2.5, 8192)
        assert found.max_position == 20480  # what the scaling is for
    factors = {"short_factor": [1, 1.5] * 4, "long_factor": [2.0, 64] * 4}
    expected = RopeScaling(
        "longrope", 2.0, 4096, short_factors=(1.0, 1.5) * 4, long_factors=(2.0, 64.0) * 4
    )
    for config in (
        bare(rope_scaling={"type": "su", **factors}, original_max_position_embeddings=4096),
        bare(rope_scaling={"type": "longrope", **factors}, original_max_position_embeddings=4096),
        bare(
            rope_parameters={
                "rope_type": "longrope",
                "original_max_position_embeddings": 4096,
                **factors,
            }
        ),
    ):
        assert from_hf(config).rope_scaling == expected


@pytest.mark.parametrize("kind", ["ntk", "proportional", "mrope"])
def test_unknown_rope_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ModelError, match=f"rope type '{kind}'"):
        from_hf(bare(rope_scaling={"rope_type": kind, "factor": 2.0}))


def test_windows() -> None:
    def windows(family: str, **changes: Any) -> tuple[int | None, ...]:
        return from_hf(written(family, **changes)).windows

    assert windows("mistral", sliding_window=32) == (32,) * 4
    assert windows("mistral", sliding_window=None) == (None,) * 4
    assert windows("mistral", sliding_window=8192) == (None,) * 4  # never binds
    assert windows("qwen2", sliding_window=32) == (None,) * 4
    partly = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}
    assert windows("qwen2", **partly) == (None, None, None, 32)
    assert windows("qwen3", **partly) == (None, None, None, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows("qwen3", **partly, layer_types=kinds) == (32, None, 32, None)
    without_kinds = {"model_type": "qwen2", **SIZES, **partly}
    assert from_hf(without_kinds).windows == (None, None, None, 32)


def test_tokens_and_dtype() -> None:
    config = from_hf(
        bare(bos_token_id=1, eos_token_id=2, torch_dtype="torch.bfloat16"),
        {"eos_token_id": [7, 8]},
    )
    assert (config.bos_token_id, config.eos_token_ids) == (1, (7, 8, 2))
    assert config.dtype == "bfloat16"
    assert from_hf(bare(dtype="float16")).dtype == "float16"
    assert from_hf(bare()).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' is not supported; supported are llama, mistral",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"vocab_size": None}, "config.json has no vocab_size"),
        ({"hidden_size": "64"}, "hidden_size is '64', must be a whole number"),
        ({"num_hidden_layers": 0}, "num_layers is 0, must be above 0"),
        ({"num_key_value_heads": 3}, "num_heads is 4, must be a multiple of num_kv_heads"),
        ({"head_dim": 15}, "rope_dim is 15, must be even"),
        ({"rope_scaling": {"type": "linear"}}, "no factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope factor is 0.0, must be above 0"),
        ({"rope_scaling": {"type": "dynamic"}}, "no factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor is 0.5, must be 1 or more"),
        ({"rope_scaling": {"type": "longrope"}}, "config.json has no short_factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "config.json has no long_factor",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": 2.0}},
            "short_factor is 2.0, must be a list of numbers",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": ["x"]}},
            "short_factor is 'x', must be a number",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1, -2]}},
            "short_factor holds -2.0, must be above 0",
        ),
        ({"rope_scaling": 4}, "rope_scaling is 4, must be an object"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"rope_theta": -1}, "rope_theta is -1.0, must be above 0"),
    ],
)
def test_faults_name_key_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_hf(bare(**changes))


def test_sizes_are_checked_wherever_they_come_from() -> None:
    config = from_hf(bare())
    with pytest.raises(ModelError, match="windows has 1 entries for 4 layers"):
        ModelConfig(**{**config.__dict__, "windows": (None,)})
