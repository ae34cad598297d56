"""A random Llama with a byte tokenizer and a chat template, as transformers writes a directory."""

import json
from pathlib import Path

import numpy
import tokenizers
from safetensors.numpy import save_file

VOCABULARY = 258  # a token for each byte, and two special ones
END = 257
_HIDDEN = 32
_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_model(directory: Path, num_layers: int = 1, max_position: int = 4096) -> Path:
    """Write one; a layer costs about 0.15 ms a step, so their number sets the pace.

    Args:
        directory: Made here; its name becomes the model's.
        num_layers: Of the decoder.
        max_position: Longest context, tokens.

    Returns:
        The directory.
    """
    directory.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _HIDDEN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": END,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    save_file(_weights(num_layers), directory / "model.safetensors")
    _tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def _weights(num_layers: int) -> dict[str, numpy.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (VOCABULARY, _HIDDEN),
        "norm": (_HIDDEN,),
    }
    for layer in range(num_layers):
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in (
                ("input_layernorm", (_HIDDEN,)),
                ("post_attention_layernorm", (_HIDDEN,)),
                ("self_attn.q_proj", (_HIDDEN, _HIDDEN)),
                ("self_attn.k_proj", (_HIDDEN // 2, _HIDDEN)),
                ("self_attn.v_proj", (_HIDDEN // 2, _HIDDEN)),
                ("self_attn.o_proj", (_HIDDEN, _HIDDEN)),
                ("mlp.gate_proj", (_HIDDEN, _HIDDEN)),
                ("mlp.up_proj", (_HIDDEN, _HIDDEN)),
                ("mlp.down_proj", (_HIDDEN, _HIDDEN)),
            )
        }
    chance = numpy.random.default_rng(0)
    return {
        f"model.{name}.weight": chance.normal(0, 0.2, shape).astype(numpy.float32)
        for name, shape in shapes.items()
    }


def _tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({character: at for at, character in enumerate(alphabet)}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|bos|>", "<|end|>"])
    return backend
