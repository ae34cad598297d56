"""What a GGUF file says about a Llama-type model: its ModelConfig and its tensors by name."""

import math
import re
from collections import Counter
from typing import Any

from gguf import GGMLQuantizationType

from memd.errors import ModelError
from memd.models.config import ModelConfig, RopeScaling
from memd.models.gguf_file import GgufFile, GgufTensor

# GGUF calls Mistral "llama" too; the mathematics is the same.
ARCHITECTURES = ("llama", "phi3", "qwen2", "qwen3")
_TOP_LEVEL = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED_IN_LAYER = _IN_LAYER | {"ffn_up": "mlp.gate_up_proj"}  # of phi3
_ROPE_FACTORS = "rope_freqs.weight"
_LONGROPE_FACTORS = "rope_factors_{}.weight"
_IN_CONFIG = (_ROPE_FACTORS, *map(_LONGROPE_FACTORS.format, ("short", "long")))
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
_NATIVE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def canonical_name(name: str, fused: bool = False) -> str | None:
    """Hugging Face's name without `model.`, or None for a tensor the decoder has no place for.

    Args:
        fused: `ffn_up` holds the gate, too.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    in_layer = _FUSED_IN_LAYER if fused else _IN_LAYER
    part = (_TOP_LEVEL if match["layer"] is None else in_layer).get(match["part"])
    if part is None:
        return None
    prefix = "" if match["layer"] is None else f"layers.{match['layer']}."
    return f"{prefix}{part}.{match['kind']}"


def canonical_tensors(file: GgufFile) -> dict[str, GgufTensor]:
    """Tensors by canonical name; those without one keep GGUF's. Rope factors are in the config."""
    fused = file.metadata.get("general.architecture") == "phi3"
    return {
        canonical_name(name, fused) or name: tensor
        for name, tensor in file.tensors.items()
        if name not in _IN_CONFIG
    }


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Translate GGUF metadata.

    Raises:
        ModelError: the architecture or rope type is not supported, a key or tensor is missing, or
            sizes contradict each other.
    """
    architecture = file.require("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    if "token_embd.weight" not in file.tensors:
        raise ModelError("tensor token_embd.weight is missing")
    if _get(file, "expert_count", 0):
        raise ModelError("mixtures of experts are not supported")
    num_layers = _size(file, "block_count")
    num_heads = _size(file, "attention.head_count")
    hidden_size = _size(file, "embedding_length")
    head_dim = _size(file, "attention.key_length", hidden_size // max(num_heads, 1))
    if _size(file, "attention.value_length", head_dim) != head_dim:
        raise ModelError("keys and values of different length are not supported")
    rope_dim = _size(file, "rope.dimension_count", head_dim)
    max_position = _size(file, "context_length")
    window = _size(file, "attention.sliding_window", 0)
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    ends = [file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=_size(file, "feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_size(file, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=float(_get(file, "attention.layer_norm_rms_epsilon", 1e-6)),
        rope_theta=float(_get(file, "rope.freq_base", 10_000.0)),
        rope_scaling=_rope_scaling(file, rope_dim, max_position),
        rope_dim=rope_dim,
        attention_bias=not {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}.isdisjoint(file.tensors),
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tie_embeddings="output.weight" not in file.tensors,
        windows=(window if 0 < window < max_position else None,) * num_layers,
        dtype=_dtype(file),
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
    )


def _get(file: GgufFile, key: str, default: Any) -> Any:
    return file.metadata.get(f"{file.metadata['general.architecture']}.{key}", default)


def _size(file: GgufFile, key: str, default: int | None = None) -> int:
    name = f"{file.metadata['general.architecture']}.{key}"
    value = file.require(name) if default is None else file.metadata.get(name, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{name} is {value!r}, must be one whole number")
    return value


def _dtype(file: GgufFile) -> str:
    """Of the type that fills most bytes; quantised weights get bfloat16, for its range."""
    held: Counter[GGMLQuantizationType] = Counter()
    for tensor in file.tensors.values():
        held[tensor.type] += tensor.data.size
    return _NATIVE_DTYPES.get(held.most_common(1)[0][0].name, "bfloat16")


def _rope_scaling(file: GgufFile, rope_dim: int, max_position: int) -> RopeScaling | None:
    if _LONGROPE_FACTORS.format("long") in file.tensors:
        return _longrope(file, max_position)
    kind = _get(file, "rope.scaling.type", "linear")
    # Files older than the typed keys carry a linear factor alone.
    factor = float(_get(file, "rope.scaling.factor", _get(file, "rope.scale_linear", 1.0)))
    if not factor > 0:
        raise ModelError(f"rope.scaling.factor is {factor}, must be above 0")
    scaled = kind == "yarn" or (kind == "linear" and factor != 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"rope type {kind!r} is not supported; supported are linear, yarn")
    if _ROPE_FACTORS in file.tensors:
        factors = tuple(float(value) for value in file.tensors[_ROPE_FACTORS].dequantise().ravel())
        if scaled:
            raise ModelError(f"{_ROPE_FACTORS} beside rope type {kind!r} is not supported")
        if len(factors) != rope_dim // 2:
            raise ModelError(
                f"{_ROPE_FACTORS} has {len(factors)} factors, must have {rope_dim // 2}"
            )
        return RopeScaling("factors", factors=factors)
    if not scaled:
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    scale = _get(file, "rope.scaling.yarn_attn_factor", _get(file, "rope.scaling.attn_factor", 1.0))
    return RopeScaling(
        "yarn",
        factor,
        _size(file, "rope.scaling.original_context_length", max_position),
        beta_fast=float(_get(file, "rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(_get(file, "rope.scaling.yarn_beta_slow", 1.0)),
        # llama.cpp multiplies the factor of the paper, which is used alone when nothing is said.
        attention_factor=None if scale == 1.0 else scale * (0.1 * math.log(max(factor, 1.0)) + 1.0),
    )


def _longrope(file: GgufFile, max_position: int) -> RopeScaling:
    original = _size(file, "rope.scaling.original_context_length")
    scale = _get(file, "rope.scaling.attn_factor", None)

    def factors(length: str) -> tuple[float, ...]:
        name = _LONGROPE_FACTORS.format(length)
        if name not in file.tensors:
            raise ModelError(f"tensor {name} is missing")
        return tuple(float(value) for value in file.tensors[name].dequantise().ravel())

    return RopeScaling(
        "longrope",
        max_position / original,
        original,
        attention_factor=None if scale is None else float(scale),
        short_factors=factors("short"),
        long_factors=factors("long"),
    )
