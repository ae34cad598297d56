"""What a decoder needs to know about a model, whatever family and file format it comes from."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from memd.errors import ModelError


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was trained at.

    Source:
        linear: Chen et al. (arXiv 2306.15595); yarn: Peng et al. (arXiv 2309.00071);
        llama3: the Llama 3.1 release; frequency factors: GGUF's `rope_freqs` tensor;
        dynamic: NTK-aware scaling of the base, as in transformers; longrope: Ding et al.
        (arXiv 2402.13753).
    """

    kind: str  # "linear", "yarn", "llama3", "factors", "dynamic" or "longrope"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: scale of cos and sin; None: from factor
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    factors: tuple[float, ...] = ()  # factors: divisor of each inverse frequency
    short_factors: tuple[float, ...] = ()  # longrope: likewise, up to the original length
    long_factors: tuple[float, ...] = ()  # longrope: likewise, beyond it
    length: int | None = None  # dynamic, longrope: what the frequencies are for; None: the longest


class Span(NamedTuple):
    """What a layer sees: the last `window` tokens, itself included, and the first `sinks`."""

    window: int | None  # None: all
    sinks: int


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position",
    "rms_norm_eps",
    "rope_theta",
    "rope_dim",
)


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a Llama-type decoder. Sizes in elements, lengths in tokens.

    Raises:
        ModelError: a size is not positive, or sizes contradict each other.
    """

    architecture: str  # "llama", "mistral", "phi3", "qwen2", "qwen3"
    vocab_size: int  # rows of the output layer; may exceed the tokenizer's size
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    rope_dim: int  # leading part of head_dim that is rotated
    attention_bias: bool  # on q, k, v
    output_bias: bool  # on the attention output projection
    mlp_bias: bool
    qk_norm: bool  # RMS norm on each head of q and k
    tie_embeddings: bool
    windows: tuple[
        int | None, ...
    ]  # sliding window of each layer; counts the current token; None: full
    dtype: str  # of the checkpoint: "float32", "bfloat16", "float16"
    sinks: tuple[int, ...] = ()  # leading tokens that each layer sees besides; (): none
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ModelError(f"{name} is {value}, must be above 0")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads is {self.num_heads}, must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ModelError(
                f"rope_dim is {self.rope_dim}, must be even and at most head_dim ({self.head_dim})"
            )
        if len(self.windows) != self.num_layers:
            raise ModelError(
                f"windows has {len(self.windows)} entries for {self.num_layers} layers"
            )

    def span(self, layer: int) -> "Span":
        """What a layer sees of the tokens before."""
        return Span(self.windows[layer], self.sinks[layer] if self.sinks else 0)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values of one token, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * element_bytes
