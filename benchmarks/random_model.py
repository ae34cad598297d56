"""A model directory with random weights and a tokenizer of its own: nothing is downloaded.

Each token id has a text that no other has, so texts are equal exactly where tokens are. The words
of `workload.py` are a token each.
"""

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from workload import WORDS

from memd.bench.shapes import random_tensors
from memd.models.config import ModelConfig

# Larger than trained weights: next tokens then depend on what was attended to.
WEIGHT_FACTOR = 3


def write_model(directory: Path, shape: ModelConfig) -> Path:
    """Write config, tokenizer and weights in float32, the same ones each time.

    Args:
        directory: Made here; its name becomes the model's.
        shape: Sizes, without biases, norms of queries and rope scaling.

    Returns:
        The directory.
    """
    directory.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_embeddings,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {
        name if name.startswith("lm_head") else f"model.{name}": (
            tensor * WEIGHT_FACTOR if tensor.ndim > 1 else tensor
        )
        for name, tensor in random_tensors(shape, torch.float32, torch.device("cpu")).items()
    }
    save_file(tensors, directory / "model.safetensors")
    _tokenizer(shape.vocab_size).save(str(directory / "tokenizer.json"))
    return directory


def _tokenizer(size: int) -> tokenizers.Tokenizer:
    """Bytes, then the words' beginnings and the words, then what no text is encoded to."""
    pieces = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        piece = "Ġ"  # a space, as byte-level tokenizers write it
        for letter in word:
            merges[piece, letter] = None
            piece += letter
    pieces += [f"{before}{letter}" for before, letter in merges]
    pieces += [f"Ġ#{index}" for index in range(len(pieces), size)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({piece: at for at, piece in enumerate(pieces)}, list(merges))
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend
