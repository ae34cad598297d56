"""GGUF files made on the spot from metadata and arrays, and the demo model if it is fetched."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from tokenizers import pre_tokenizers

from memd.config import cache_dir
from memd.models.hub import DEMO_MODELS, ModelFiles, resolve

GgufMaker = Callable[..., Path]


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


@pytest.fixture
def make_gguf(tmp_path: Path) -> GgufMaker:
    """Write a GGUF file; tensors are float32 arrays, stored as `quantisation`."""

    def make(
        metadata: Mapping[str, Any],
        tensors: Mapping[str, np.ndarray],
        name: str = "model.gguf",
        architecture: str = "llama",
        quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in metadata.items():
            _add(writer, key, value)
        for tensor_name, values in tensors.items():
            kind = quantisation if values.ndim == 2 else gguf.GGMLQuantizationType.F32
            stored = gguf.quants.quantize(values.astype(np.float32), kind)
            writer.add_tensor(tensor_name, stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


@pytest.fixture
def tiny_metadata() -> dict[str, Any]:
    """Two layers, 4 heads and 2 KV heads of dimension 8, hidden size 32."""
    return {
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500_000.0,
    }


@pytest.fixture
def tiny_tensors() -> dict[str, np.ndarray]:
    """Weights that fit `tiny_metadata`, untied, vocabulary 64."""
    random = np.random.default_rng(0)
    shapes = {"token_embd": (64, 32), "output_norm": (32,), "output": (64, 32)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_norm": (32,),
            f"blk.{layer}.ffn_norm": (32,),
            f"blk.{layer}.attn_q": (32, 32),
            f"blk.{layer}.attn_k": (16, 32),
            f"blk.{layer}.attn_v": (16, 32),
            f"blk.{layer}.attn_output": (32, 32),
            f"blk.{layer}.ffn_gate": (64, 32),
            f"blk.{layer}.ffn_up": (64, 32),
            f"blk.{layer}.ffn_down": (32, 64),
        }
    return {
        f"{name}.weight": random.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="session")
def demo_files() -> ModelFiles:
    """The demo model, if `memd models fetch smollm2-135m` has run."""
    if not DEMO_MODELS["smollm2-135m"].is_fetched(cache_dir()):
        pytest.skip("the demo model is not fetched")
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def demo_reference(demo_files: ModelFiles) -> Any:
    """transformers' tokenizer of the demo model."""
    assert demo_files.gguf is not None
    reference = transformers.AutoTokenizer.from_pretrained(
        demo_files.gguf.parent, gguf_file=demo_files.gguf.name
    )
    # transformers does not know the pre-tokenizer `smollm`; tokenizer.json of the model has this.
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return reference
