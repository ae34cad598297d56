"""The demo model, as a file, as memd loads it, and as transformers does."""

from functools import cache, lru_cache
from unittest.mock import patch

import gguf
import pytest
import torch

from memd.config import cache_dir
from memd.models.hub import DEMO_MODELS, ModelFiles, resolve

NAME = "smollm2-135m"

needs_demo_model = pytest.mark.skipif(
    not DEMO_MODELS[NAME].is_fetched(cache_dir()),
    reason=f"the demo model is not fetched: run `memd models fetch {NAME}`",
)


@lru_cache(maxsize=1)
def files() -> ModelFiles:
    return resolve(NAME)


@lru_cache(maxsize=1)
def transformers_model() -> torch.nn.Module:
    """transformers' Llama with the same dequantised weights, float32, eager attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = files().gguf
    assert path is not None
    # Without it, transformers reads the file, and all of its vocabulary, twice.
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    # It asks for the names of all tensors again for each of its 397 modules.
    with patch("gguf.get_tensor_name_map", cache(gguf.get_tensor_name_map)):
        model = LlamaForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, config=config
        )
    return model.eval()


@lru_cache(maxsize=1)
def long_text() -> str:
    """Plain English that every Python carries."""
    from pydoc_data import topics

    return str(topics.topics["execmodel"]) + str(topics.topics["import"])
