"""Loading weights: everything that is wrong is said at once (C103), and nothing is copied twice."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from memd.errors import ModelError
from memd.models.checkpoint import expected_shapes, load_tensors
from memd.models.config import ModelConfig
from memd.models.hf_config import from_hf
from memd.models.hub import ModelFiles, read_config

CONFIG = from_hf(
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)
UP = "model.layers.1.mlp.up_proj.weight"


def weights(config: ModelConfig = CONFIG) -> dict[str, torch.Tensor]:
    """Random tensors under Hugging Face's names."""
    generator = torch.Generator().manual_seed(0)
    return {
        name if name == "lm_head.weight" else f"model.{name}": torch.randn(
            shape, generator=generator
        )
        for name, shape in expected_shapes(config).items()
    }


def load(directory: Path, **changes: Any) -> dict[str, torch.Tensor]:
    arguments = {"config": CONFIG, "dtype": torch.float32, "device": "cpu", **changes}
    return load_tensors(ModelFiles("m", directory=directory), **arguments)


def test_one_file(tmp_path: Path) -> None:
    saved = weights()
    saved["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(saved, tmp_path / "model.safetensors")
    seen: list[float] = []
    tensors = load(tmp_path, progress=seen.append)
    assert tensors.keys() == expected_shapes(CONFIG).keys()
    assert torch.equal(tensors["layers.1.mlp.up_proj.weight"], saved[UP])
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    half = load(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(half["norm.weight"], saved["model.norm.weight"].bfloat16())


def test_names_match_transformers(tmp_path: Path) -> None:
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        hf = getattr(transformers, f"{family}Config")(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
        )
        model = getattr(transformers, f"{family}ForCausalLM")(hf)
        model.save_pretrained(tmp_path / family)
        files = ModelFiles(family, directory=tmp_path / family)
        config = read_config(files)
        tensors = load_tensors(files, config, torch.float32, "cpu")
        state = model.state_dict()
        assert {f"model.{n}".replace("model.lm_", "lm_") for n in tensors} == state.keys()
        assert all(
            torch.equal(tensor, state[f"model.{name}".replace("model.lm_", "lm_")])
            for name, tensor in tensors.items()
        )


def test_shards(tmp_path: Path) -> None:
    saved = weights()
    names = sorted(saved)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for part, held in parts.items():
        save_file({name: saved[name] for name in held}, tmp_path / part)
    index = {"weight_map": {name: part for part, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load(tmp_path)["layers.1.mlp.up_proj.weight"], saved[UP])
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert "index.json names b.safetensors, which does not exist" in message
    assert all(name.removeprefix("model.") in message for name in parts["b.safetensors"])


def test_all_faults_in_one_message(tmp_path: Path) -> None:
    saved = weights()
    saved["model.layers.0.mlp.renamed.weight"] = saved.pop("model.layers.0.mlp.up_proj.weight")
    del saved[UP]
    saved["model.norm.weight"] = torch.ones(31)
    saved["model.embed_tokens.weight"] = torch.ones(64, 32, dtype=torch.int8)
    save_file(saved, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert "missing tensors: layers.0.mlp.up_proj.weight, layers.1.mlp.up_proj.weight" in message
    assert "tensors that have no place: layers.0.mlp.renamed.weight" in message
    assert "norm.weight has shape [31], must be [32]" in message
    assert "model.embed_tokens.weight has type I8" in message


def test_an_unknown_tensor_is_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({**weights(), "model.vision.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path).keys() == expected_shapes(CONFIG).keys()
    assert "vision.weight" in caplog.text


def test_a_tied_model_may_carry_its_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    tied = ModelConfig(**{**CONFIG.__dict__, "tie_embeddings": True})
    assert "lm_head.weight" not in load(tmp_path, config=tied)
    assert not caplog.records


def test_damage_and_pickles(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights(), path)
    whole = path.read_bytes()
    for content in (whole[:-8], whole[:100], b"", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.safetensors is cut off or damaged"):
            load(tmp_path)
    path.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only safetensors and GGUF .*pytorch_model\.bin is not"):
        load(tmp_path)


def test_tensors_own_their_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights(), path)
    tensors = load(tmp_path)
    before = tensors["norm.weight"].clone()
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(tensors["norm.weight"], before)


def test_gguf(make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any) -> None:
    files = ModelFiles("m", gguf=make_gguf(tiny_metadata, tiny_tensors))
    tensors = load_tensors(files, read_config(files), torch.float32, "cpu")
    want = torch.from_numpy(tiny_tensors["blk.1.ffn_up.weight"])
    assert torch.equal(tensors["layers.1.mlp.up_proj.weight"], want)
    q_rows = tiny_tensors["blk.1.attn_q.weight"].reshape(4, 4, 2, 32).swapaxes(1, 2)
    assert torch.equal(
        tensors["layers.1.self_attn.q_proj.weight"], torch.from_numpy(q_rows.reshape(32, 32))
    )
    del tiny_tensors["blk.1.ffn_up.weight"]
    cut = ModelFiles("m", gguf=make_gguf(tiny_metadata, tiny_tensors))
    with pytest.raises(ModelError, match=r"model\.gguf: missing tensors: layers\.1\.mlp\.up_proj"):
        load_tensors(cut, read_config(cut), torch.float32, "cpu")
