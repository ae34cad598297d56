"""Rotary frequencies and their scaled variants."""

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from memd.errors import ModelError
from memd.models.config import ModelConfig, RopeScaling

MAX_POSITION = 2**24  # whole numbers that float32 holds exactly


def stretched(model: ModelConfig, max_len: int | Literal["auto"]) -> ModelConfig:
    """The model with frequencies for texts of up to `max_len` tokens, where they depend on that.

    With `dynamic` and `longrope` scaling the frequencies follow from a length. They are fixed for
    the longest text that is served, not for each text as it grows: keys are rotated once and stay
    in the cache, where longer and shorter texts share them.
    """
    scaling = model.rope_scaling
    if scaling is None or scaling.kind not in ("dynamic", "longrope") or max_len == "auto":
        return model
    length = min(max_len, model.max_position)
    return replace(model, rope_scaling=replace(scaling, length=length))


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """The angle by which one position turns each pair of dimensions, and the scale of cos and sin.

    Returns:
        [rope_dim / 2], float32, radians per token; a factor (1 but for yarn and longrope).

    Raises:
        ModelError: the kind of scaling is not known, or lacks a value.

    Source:
        Su et al., arXiv 2104.09864; the variants as in `RopeScaling`. In float32, as models are
        trained.
    """
    exponents = torch.arange(0, config.rope_dim, 2).float() / config.rope_dim
    inverse = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return inverse, 1.0
    match scaling.kind:
        case "linear":
            return inverse / scaling.factor, 1.0
        case "factors":
            return inverse / _factors(scaling.factors, "frequency", len(inverse)), 1.0
        case "dynamic":
            return _dynamic(scaling, config, exponents), 1.0
        case "longrope":
            return _longrope(scaling, config, exponents), _longrope_attention_factor(scaling)
        case "llama3":
            return _llama3(inverse, scaling), 1.0
        case "yarn":
            return _yarn(inverse, scaling, config), _yarn_attention_factor(scaling)
    raise ModelError(
        f"rope scaling is {scaling.kind!r}; known are linear, llama3, yarn, dynamic, longrope and "
        "frequency factors"
    )


class Rotary:
    """Cosines and sines of positions.

    Computed for the tokens of a step rather than looked up: as fast, for any length, and no table.
    Positions are exact up to `MAX_POSITION`; products are rounded as in transformers.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        inverse, self._scale = inverse_frequencies(config)
        self._inverse = inverse.to(device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled cos and sin, each [T, rope_dim / 2] float32, of positions [T] int64."""
        angles = positions[:, None].float() * self._inverse
        return angles.cos() * self._scale, angles.sin() * self._scale


def _factors(factors: tuple[float, ...], name: str, count: int) -> Tensor:
    if len(factors) != count:
        raise ModelError(f"rope has {len(factors)} {name} factors, the model needs {count}")
    return torch.tensor(factors, dtype=torch.float32)


def _dynamic(scaling: RopeScaling, config: ModelConfig, exponents: Tensor) -> Tensor:
    """As plain ones of a larger base, from the original length on."""
    original, dim = _original_length(scaling), config.rope_dim
    if dim < 4:
        raise ModelError(f"rope scaling dynamic needs 4 rotated dimensions, the model has {dim}")
    length = max(scaling.length or config.max_position, original)
    growth = scaling.factor * length / original - (scaling.factor - 1)
    base = config.rope_theta * growth ** (dim / (dim - 2))
    inverse: Tensor = 1.0 / base**exponents
    return inverse


def _longrope(scaling: RopeScaling, config: ModelConfig, exponents: Tensor) -> Tensor:
    """Each frequency divided by a factor of its own, another beyond the original length."""
    short = _factors(scaling.short_factors, "short", len(exponents))
    long = _factors(scaling.long_factors, "long", len(exponents))
    length = scaling.length or config.max_position
    divisors = long if length > _original_length(scaling) else short
    return 1.0 / (divisors * config.rope_theta**exponents)


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(_original_length(scaling)))


def _original_length(scaling: RopeScaling) -> int:
    if scaling.original_max_position is None:
        raise ModelError(f"rope scaling {scaling.kind} has no original_max_position_embeddings")
    return scaling.original_max_position


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    turns = _original_length(scaling) / (2 * math.pi / inverse)  # within the original length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inverse / scaling.factor + kept * inverse


def _yarn(inverse: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """As llama3, with a blend that is linear in the dimension."""

    def dimension(turns: float) -> float:
        length = _original_length(scaling) / (turns * 2 * math.pi)
        return config.rope_dim * math.log(length) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rope_dim - 1)
    stretched = ((torch.arange(len(inverse)) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inverse / scaling.factor * stretched + inverse * (1 - stretched)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
