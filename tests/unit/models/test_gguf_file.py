"""GGUF files: damage is named at once (C105), metadata becomes a config, values come out right."""

import shutil
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from memd.errors import ModelError
from memd.models.config import RopeScaling
from memd.models.gguf_file import open_gguf
from memd.models.gguf_model import canonical_name, config_from_gguf
from memd.models.gguf_weights import load_tensor
from memd.models.hub import ModelFiles, read_config


def test_round_trip(make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any) -> None:
    file = open_gguf(
        make_gguf({**tiny_metadata, "list": ["a", "é"], "flags": [1, 2]}, tiny_tensors)
    )
    assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5
    assert file.metadata["list"] == ["a", "é"]
    assert file.metadata["flags"] == [1, 2]
    assert file.tensors.keys() == tiny_tensors.keys()
    for name, tensor in file.tensors.items():
        np.testing.assert_array_equal(tensor.dequantise(), tiny_tensors[name])


@pytest.mark.parametrize(
    "kind",
    [
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q8_0,
    ],
)
def test_quantised_values(
    kind: GGMLQuantizationType, make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any
) -> None:
    file = open_gguf(make_gguf(tiny_metadata, tiny_tensors, quantisation=kind))
    tensor = file.tensors["blk.0.ffn_down.weight"]
    assert tensor.type == kind
    want = tiny_tensors["blk.0.ffn_down.weight"]
    assert np.abs(tensor.dequantise() - want).max() < 0.3
    assert tensor.dequantise().dtype == np.float32


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_read(kind: str, tmp_path: Path) -> None:
    kind_number = GGMLQuantizationType[kind]
    type_size = gguf.GGML_QUANT_SIZES[kind_number][1]
    blocks = np.random.default_rng(1).integers(0, 60, (3, 2 * type_size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("x", blocks, raw_dtype=kind_number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = open_gguf(tmp_path / "k.gguf").tensors["x"]
    assert tensor.shape == (3, 512)
    np.testing.assert_array_equal(tensor.dequantise(), gguf.quants.dequantize(blocks, kind_number))


def test_cut_file_names_the_first_cut_tensor(
    make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any
) -> None:
    path = make_gguf(tiny_metadata, tiny_tensors)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1024])
    start = time.monotonic()
    with pytest.raises(
        ModelError, match=r"model\.gguf is cut off: tensor blk\.1\.ffn_down\.weight"
    ):
        open_gguf(path)
    assert time.monotonic() - start < 10


def test_every_cut_of_the_header_is_a_model_error(
    make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any
) -> None:
    path = make_gguf(tiny_metadata, tiny_tensors)
    whole = path.read_bytes()
    for size in range(1, 1500, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model\.gguf"):
            open_gguf(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"PK\x03\x04" + bytes(64), "is not a GGUF file: it begins with b'PK"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(16), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(16), "version 50331648"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16, "cut off or damaged"),
    ],
)
def test_no_gguf_at_all(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"odd\.gguf.*{message}"):
        open_gguf(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf: No such file"):
        open_gguf(tmp_path / "none.gguf")


def test_unsupported_tensor_type_is_named(
    make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any
) -> None:
    path = make_gguf(tiny_metadata, {"only.weight": tiny_tensors["output.weight"]})
    content = path.read_bytes()
    at = content.index(b"only.weight") + len(b"only.weight") + 4 + 2 * 8
    for number, label in ((GGMLQuantizationType.Q8_1, "Q8_1"), (4, "4")):
        path.write_bytes(content[:at] + int(number).to_bytes(4, "little") + content[at + 4 :])
        with pytest.raises(
            ModelError, match=rf"tensor only\.weight has type {label}, which is not"
        ):
            open_gguf(path)


def test_split_files(make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any, tmp_path: Path) -> None:
    names = list(tiny_tensors)
    total = {"split.count": 2, "split.tensors.count": len(names)}
    first = make_gguf(
        {**tiny_metadata, **total, "split.no": 0},
        {name: tiny_tensors[name] for name in names[:8]},
        name="model-00001-of-00002.gguf",
    )
    with pytest.raises(ModelError, match=r"missing beside it: model-00002-of-00002\.gguf"):
        open_gguf(first)
    second = make_gguf(
        {**total, "split.no": 1},
        {name: tiny_tensors[name] for name in names[8:]},
        name="model-00002-of-00002.gguf",
    )
    for part in (first, second):
        file = open_gguf(part)
        assert file.tensors.keys() == tiny_tensors.keys()
        assert file.metadata["llama.block_count"] == 2
    renamed = tmp_path / "renamed.gguf"
    shutil.copy(first, renamed)
    with pytest.raises(ModelError, match="is one of 2 parts but is not named like"):
        open_gguf(renamed)


def test_config(make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any) -> None:
    tokens = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    tokens |= {"tokenizer.ggml.eot_token_id": 5}
    config = config_from_gguf(open_gguf(make_gguf(tiny_metadata | tokens, tiny_tensors)))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.vocab_size, config.intermediate_size, config.max_position) == (64, 64, 256)
    assert (config.rope_theta, config.rope_scaling, config.rope_dim) == (500_000.0, None, 8)
    assert (config.attention_bias, config.mlp_bias, config.qk_norm) == (False, False, False)
    assert not config.tie_embeddings
    assert config.dtype == "float32"
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 5))
    del tiny_tensors["output.weight"]
    tiny_tensors["blk.0.attn_q.bias"] = np.zeros(32, np.float32)
    window = {"llama.attention.sliding_window": 32}
    tied = config_from_gguf(open_gguf(make_gguf(tiny_metadata | window, tiny_tensors)))
    assert tied.tie_embeddings
    assert tied.attention_bias
    assert tied.windows == (32, 32)


def test_rope_scaling(make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any) -> None:
    def scaling(**keys: Any) -> RopeScaling | None:
        changed = {f"llama.rope.{name}": value for name, value in keys.items()}
        path = make_gguf(tiny_metadata | changed, tiny_tensors)
        return config_from_gguf(open_gguf(path)).rope_scaling

    linear = {"scaling.type": "linear", "scaling.factor": 4.0}
    assert scaling(**linear) == RopeScaling("linear", 4.0)
    assert scaling(**{"scale_linear": 2.0}) == RopeScaling("linear", 2.0)
    assert scaling(**{"scaling.type": "none", "scaling.factor": 4.0}) is None
    yarn = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64}
    assert scaling(**yarn) == RopeScaling("yarn", 4.0, 64)
    with pytest.raises(ModelError, match="rope type 'longrope' is not supported"):
        scaling(**{"scaling.type": "longrope", "scaling.factor": 4.0})
    tiny_tensors["rope_freqs.weight"] = np.array([1, 1, 8, 8], np.float32)
    assert scaling() == RopeScaling("factors", factors=(1.0, 1.0, 8.0, 8.0))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight beside rope type 'linear'"):
        scaling(**linear)
    tiny_tensors["rope_freqs.weight"] = np.array([1, 1, 8], np.float32)
    with pytest.raises(ModelError, match="has 3 factors, must have 4"):
        scaling()


def test_faults_name_the_file(make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any) -> None:
    other = make_gguf({}, tiny_tensors, architecture="gptneox")
    with pytest.raises(ModelError, match=r"model\.gguf: architecture 'gptneox' is not supported"):
        read_config(ModelFiles("m", gguf=other))
    del tiny_metadata["llama.block_count"]
    incomplete = make_gguf(tiny_metadata, tiny_tensors)
    with pytest.raises(ModelError, match=r"model\.gguf: metadata has no llama\.block_count"):
        read_config(ModelFiles("m", gguf=incomplete))


def test_llama_rows_return_to_halves(make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any) -> None:
    """Row 2i + j of a head in GGUF is row i + j * (head_dim / 2) for a rotation by halves."""
    file = open_gguf(make_gguf(tiny_metadata, tiny_tensors))
    config = config_from_gguf(file)
    stored = tiny_tensors["blk.0.attn_k.weight"].reshape(2, 8, 32)
    name = "layers.0.self_attn.{}_proj.weight".format
    got = load_tensor(name("k"), file.tensors["blk.0.attn_k.weight"], config, torch.float32)
    for row in range(8):
        source = 2 * (row % 4) + row // 4
        np.testing.assert_array_equal(got.reshape(2, 8, 32)[:, row], stored[:, source])
    plain = load_tensor(name("v"), file.tensors["blk.0.attn_v.weight"], config, torch.float32)
    np.testing.assert_array_equal(plain, tiny_tensors["blk.0.attn_v.weight"])


def test_canonical_names() -> None:
    assert canonical_name("blk.11.attn_q_norm.weight") == "layers.11.self_attn.q_norm.weight"
    assert canonical_name("blk.0.ffn_down.bias") == "layers.0.mlp.down_proj.bias"
    assert canonical_name("output_norm.weight") == "norm.weight"
    assert canonical_name("blk.0.ffn_gate_exps.weight") is None
    assert canonical_name("rope_freqs.weight") is None
