"""The demo model, as a file, as memd loads it, and as transformers does."""

from functools import lru_cache

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
    from transformers import AutoModelForCausalLM

    path = files().gguf
    assert path is not None
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@lru_cache(maxsize=1)
def long_text() -> str:
    """Plain English that every Python carries."""
    from pydoc_data import topics

    return str(topics.topics["execmodel"]) + str(topics.topics["import"])
