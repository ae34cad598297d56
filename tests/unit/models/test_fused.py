"""Phi-3: projections that its checkpoints keep as one tensor, and what its files say of rope."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from memd.errors import ModelError
from memd.models.checkpoint import expected_shapes, load_tensors
from memd.models.config import ModelConfig, RopeScaling
from memd.models.fused import parts_of
from memd.models.gguf_file import open_gguf
from memd.models.gguf_model import config_from_gguf
from memd.models.hf_config import from_hf
from memd.models.hub import ModelFiles, read_config

CONFIG = from_hf(
    {
        "model_type": "phi3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)
QKV, GATE_UP = "layers.1.self_attn.qkv_proj.weight", "layers.1.mlp.gate_up_proj.weight"


def saved(directory: Path, **changes: torch.Tensor | None) -> ModelFiles:
    """A fused checkpoint of `CONFIG`, some tensors changed or left out."""
    shapes = {
        name: shape
        for name, shape in expected_shapes(CONFIG).items()
        if not any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    }
    for layer in range(2):
        shapes[f"layers.{layer}.self_attn.qkv_proj.weight"] = (64, 32)
        shapes[f"layers.{layer}.mlp.gate_up_proj.weight"] = (128, 32)
    tensors: dict[str, torch.Tensor | None] = {
        name: torch.arange(torch.Size(shape).numel()).float().view(shape)
        for name, shape in shapes.items()
    }
    tensors |= changes
    there = {f"model.{name}": tensor for name, tensor in tensors.items() if tensor is not None}
    if "model.lm_head.weight" in there:
        there["lm_head.weight"] = there.pop("model.lm_head.weight")
    save_file(there, directory / "model.safetensors")
    return ModelFiles("m", directory=directory)


def test_rows_of_the_parts() -> None:
    shapes = expected_shapes(CONFIG)
    assert parts_of(QKV, shapes) == {
        "layers.1.self_attn.q_proj.weight": (0, 32),
        "layers.1.self_attn.k_proj.weight": (32, 48),
        "layers.1.self_attn.v_proj.weight": (48, 64),
    }
    assert list(parts_of(GATE_UP, shapes).values()) == [(0, 64), (64, 128)]
    assert parts_of("layers.1.self_attn.o_proj.weight", shapes) == {}
    assert parts_of("layers.2.self_attn.qkv_proj.weight", shapes) == {}
    assert parts_of("layers.1.self_attn.qkv_proj.bias", shapes) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = load_tensors(saved(tmp_path), CONFIG, dtype, "cpu")
    assert tensors.keys() == expected_shapes(CONFIG).keys()
    rows = torch.arange(64 * 32).float().view(64, 32).to(dtype)
    assert torch.equal(tensors["layers.1.self_attn.q_proj.weight"], rows[:32])
    assert torch.equal(tensors["layers.1.self_attn.v_proj.weight"], rows[48:])
    up = tensors["layers.0.mlp.up_proj.weight"]
    assert up[0, 0] == torch.tensor(64 * 32).to(dtype)
    assert up.untyped_storage().nbytes() == up.numel() * up.element_size()


def test_what_does_not_fit_is_said_of_the_fused_tensor(tmp_path: Path) -> None:
    extra = {"layers.0.mlp.up_proj.weight": torch.zeros(64, 32)}
    with pytest.raises(ModelError) as caught:
        load_tensors(
            saved(tmp_path, **{QKV: torch.zeros(96, 32), GATE_UP: None}, **extra),
            CONFIG,
            torch.float32,
            "cpu",
        )
    message = str(caught.value)
    assert f"{QKV} has shape [96, 32], must be [64, 32]" in message
    assert "missing tensors: layers.1.mlp.gate_proj.weight, layers.1.mlp.up_proj" in message
    assert "layers.0.mlp.up_proj.weight is there twice" in message


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_each_name_of_its_rope(kind: str) -> None:
    """transformers reads all of them as `longrope`."""
    factors = {
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 4096,
    }
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 16384,
    }
    hf = transformers.Phi3Config(**sizes, rope_scaling={"type": kind, **factors})
    assert hf.rope_parameters["rope_type"] == "longrope"
    whole = {"vocab_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, **sizes}
    scaling = {"rope_scaling": {"type": kind, **factors}}
    found = from_hf({"model_type": "phi3", **whole, **scaling})
    assert found.rope_scaling == RopeScaling(
        "longrope", 4.0, 4096, short_factors=(1.0, 1.5, 2.0, 2.5), long_factors=(1.0, 2.0, 4.0, 8.0)
    )


@pytest.fixture
def phi3_gguf(
    make_gguf: Any, tiny_metadata: dict[str, Any], tiny_tensors: dict[str, np.ndarray]
) -> Any:
    """A maker of Phi-3 files with the tiny model's weights, fused."""
    metadata = {key.replace("llama.", "phi3."): value for key, value in tiny_metadata.items()}
    tensors = dict(tiny_tensors)
    for layer in range(2):
        block = f"blk.{layer}."
        parts = [tensors.pop(f"{block}attn_{part}.weight") for part in "qkv"]
        tensors[f"{block}attn_qkv.weight"] = np.concatenate(parts)
        parts = [tensors.pop(f"{block}ffn_{part}.weight") for part in ("gate", "up")]
        tensors[f"{block}ffn_up.weight"] = np.concatenate(parts)

    def make(
        keys: dict[str, Any] | None = None,
        more: dict[str, np.ndarray] | None = None,
        **options: Any,
    ) -> Path:
        path: Path = make_gguf(
            metadata | (keys or {}), tensors | (more or {}), architecture="phi3", **options
        )
        return path

    return make


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf(phi3_gguf: Any, tiny_tensors: dict[str, np.ndarray], kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    files = ModelFiles("m", gguf=phi3_gguf(quantisation=quantisation))
    config = read_config(files)
    assert (config.architecture, config.attention_bias, config.mlp_bias) == ("phi3", False, False)
    tensors = load_tensors(files, config, torch.float32, "cpu")
    assert tensors.keys() == expected_shapes(config).keys()
    for ours, theirs in (
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
    ):
        stored = gguf.quants.quantize(tiny_tensors[f"blk.1.{theirs}.weight"], quantisation)
        expected = gguf.quants.dequantize(stored, quantisation)
        np.testing.assert_array_equal(tensors[f"layers.1.{ours}.weight"].numpy(), expected)


def test_rope_factors_of_gguf(phi3_gguf: Any) -> None:
    original = {"phi3.rope.scaling.original_context_length": 64}
    factors = {
        "rope_factors_short.weight": np.array([1, 1, 1.5, 2], np.float32),
        "rope_factors_long.weight": np.array([1, 2, 4, 8], np.float32),
    }

    def config(*given: Any) -> ModelConfig:
        return config_from_gguf(open_gguf(phi3_gguf(*given)))

    both: dict[str, Any] = {
        "short_factors": (1.0, 1.0, 1.5, 2.0),
        "long_factors": (1.0, 2.0, 4.0, 8.0),
    }
    assert config(original, factors).rope_scaling == RopeScaling("longrope", 4.0, 64, **both)
    scaled = original | {"phi3.rope.scaling.attn_factor": 1.25}
    expected = RopeScaling("longrope", 4.0, 64, attention_factor=1.25, **both)
    assert config(scaled, factors).rope_scaling == expected
    files = ModelFiles("m", gguf=phi3_gguf(original, factors))
    load_tensors(files, read_config(files), torch.float32, "cpu")
    del factors["rope_factors_short.weight"]
    with pytest.raises(ModelError, match=r"tensor rope_factors_short\.weight is missing"):
        config(original, factors)
