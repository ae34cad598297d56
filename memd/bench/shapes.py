"""Models of known shapes with random weights, and the least time that work on them can take."""

from typing import Any

import torch

from memd.bench.cases import Case
from memd.models.config import ModelConfig

_COMMON: dict[str, Any] = {
    "architecture": "llama",
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "dtype": "bfloat16",
}
SHAPES = {
    "llama8b": ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position=8192,
        rope_theta=5e5,
        rope_dim=128,
        tie_embeddings=False,
        windows=(None,) * 32,
        **_COMMON,
    ),
    "smol135m": ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position=8192,
        rope_theta=1e5,
        rope_dim=64,
        tie_embeddings=True,
        windows=(None,) * 30,
        **_COMMON,
    ),
}


def random_tensors(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Random parameters under the names that `Decoder` takes."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = {
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{index}.{norm}.weight"] = (hidden,)
    shapes["norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.ones(shape, dtype=dtype, device=device)
        if len(shape) == 1
        else torch.randn(shape, dtype=dtype, device=device, generator=generator) * 0.02
        for name, shape in shapes.items()
    }


def floor_seconds(config: ModelConfig, case: Case, read_limit: float, matmul_limit: float) -> float:
    """Least time for a case on a card, with weights and KV of two bytes an element.

    Args:
        config: The model.
        case: What is generated.
        read_limit: Bytes a second; each decoding step reads the weights and the KV once.
        matmul_limit: Operations a second; prefill is matrix products.
    """
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    layer = hidden * dim * (2 * config.num_heads + 2 * config.num_kv_heads) + 3 * hidden * inner
    weights = layer * config.num_layers
    head = config.vocab_size * hidden
    new = case.prompt_tokens * case.requests - case.shared_tokens * (case.requests - 1)
    prefill = 2 * weights * new / matmul_limit
    context = case.prompt_tokens - case.shared_tokens + case.output_tokens / 2
    kv = config.kv_bytes_per_token(2) * (case.requests * context + case.shared_tokens)
    decode = (case.output_tokens - 1) * ((weights + head) * 2 + kv) / read_limit
    return prefill + decode
