"""Rotary frequencies and their scaled variants."""

import math

import torch
from torch import Tensor

from memd.errors import ModelError
from memd.models.config import ModelConfig, RopeScaling

MAX_POSITION = 2**24  # whole numbers that float32 holds exactly


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """The angle by which one position turns each pair of dimensions, and the scale of cos and sin.

    Returns:
        [rope_dim / 2], float32, radians per token; a factor (1 but for yarn).

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
            return inverse / _factors(scaling, len(inverse)), 1.0
        case "llama3":
            return _llama3(inverse, scaling), 1.0
        case "yarn":
            return _yarn(inverse, scaling, config), _yarn_attention_factor(scaling)
    raise ModelError(
        f"rope scaling is {scaling.kind!r}; known are linear, llama3, yarn and frequency factors"
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


def _factors(scaling: RopeScaling, count: int) -> Tensor:
    if len(scaling.factors) != count:
        raise ModelError(
            f"rope has {len(scaling.factors)} frequency factors, the model needs {count}"
        )
    return torch.tensor(scaling.factors, dtype=torch.float32)


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
