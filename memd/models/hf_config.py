"""`config.json` of a Hugging Face directory -> ModelConfig.

Reads what transformers writes today (`rope_parameters`, `dtype`, `layer_types`) and what it wrote
before (`rope_scaling`, `rope_theta`, `torch_dtype`). Defaults of absent keys are those of
transformers' config classes. What would change the mathematics and is not known is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from memd.errors import ModelError
from memd.models.config import ModelConfig, RopeScaling

# What transformers assumes for a key that config.json leaves out, where families differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096},
    "phi3": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
}
_DTYPES = ("float32", "bfloat16", "float16")


def from_hf(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Translate a parsed `config.json`.

    Args:
        config: The object in config.json.
        generation_config: The object in generation_config.json, whose end tokens come first.

    Raises:
        ModelError: the family, activation, quantisation or rope type is not supported, a required
            key is missing or of the wrong type, or sizes contradict each other.
    """
    family = config.get("model_type")
    if family not in _DEFAULTS:
        raise ModelError(
            f"model_type {family!r} is not supported; supported are {', '.join(_DEFAULTS)}"
        )
    known = {**_DEFAULTS[family], **config}
    _refuse_unsupported(known)
    num_heads = _integer(known, "num_attention_heads")
    hidden_size = _integer(known, "hidden_size")
    head_dim = _integer(known, "head_dim", hidden_size // max(num_heads, 1))
    max_position = _integer(known, "max_position_embeddings")
    num_layers = _integer(known, "num_hidden_layers")
    rope = _mapping(known, "rope_scaling") or _mapping(known, "rope_parameters")
    rope_scaling = _rope_scaling(rope, known, max_position)
    if rope_scaling is not None and rope_scaling.kind == "dynamic":
        max_position = int(max_position * rope_scaling.factor)
    partial = rope.get("partial_rotary_factor") or known.get("partial_rotary_factor") or 1.0
    flagged_bias = family in ("llama", "qwen3") and bool(known.get("attention_bias", False))
    return ModelConfig(
        architecture=family,
        vocab_size=_integer(known, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(known, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_integer(known, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=_number(known, "rms_norm_eps", 1e-6),
        rope_theta=_number(rope, "rope_theta", _number(known, "rope_theta", 10_000.0)),
        rope_scaling=rope_scaling,
        rope_dim=int(head_dim * partial),
        attention_bias=flagged_bias or family == "qwen2",
        output_bias=flagged_bias,
        mlp_bias=family == "llama" and bool(known.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        tie_embeddings=bool(known.get("tie_word_embeddings", False)),
        windows=_windows(family, known, num_layers, max_position),
        dtype=_dtype(known),
        bos_token_id=_first(_ids(known, "bos_token_id")),
        eos_token_ids=tuple(
            dict.fromkeys(
                _ids(generation_config or {}, "eos_token_id") + _ids(known, "eos_token_id")
            )
        ),
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act {activation!r} is not supported; supported is silu")
    quantisation = _mapping(config, "quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "unnamed")
        raise ModelError(
            f"quantization_config with quant_method {method!r} is not supported; "
            "use unquantised safetensors or a GGUF file"
        )


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json: {key} is {value!r}, must be an object")
    return value


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json has no {key}")
    return value


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"config.json: {key} is {value!r}, must be a whole number")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelError(f"config.json: {key} is {value!r}, must be a number")
    return float(value)


def _optional(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else _number(config, key)


def _numbers(config: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = _value(config, key, None)
    if not isinstance(values, list):
        raise ModelError(f"config.json: {key} is {values!r}, must be a list of numbers")
    numbers = tuple(_number({key: value}, key) for value in values)
    if not all(number > 0 for number in numbers):
        raise ModelError(f"config.json: {key} holds {min(numbers)}, must be above 0")
    return numbers


def _ids(config: Mapping[str, Any], key: str) -> list[int]:
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ModelError(f"{key} is {value!r}, must be a token id or a list of them")
    return ids


def _first(ids: list[int]) -> int | None:
    return ids[0] if ids else None


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; supported are {', '.join(_DTYPES)}")
    return dtype


def _windows(
    family: str, config: Mapping[str, Any], num_layers: int, max_position: int
) -> tuple[int | None, ...]:
    always = family in ("mistral", "phi3")
    uses_window = always or bool(config.get("use_sliding_window", False))
    if not uses_window or config.get("sliding_window") is None:
        return (None,) * num_layers
    window = _integer(config, "sliding_window")
    if window >= max_position:
        return (None,) * num_layers
    if window < 1:
        raise ModelError(f"sliding_window is {window}, must be 1 or more")
    kinds = config.get("layer_types")
    if kinds is not None:
        unknown = set(kinds) - {"sliding_attention", "full_attention"}
        if unknown:
            raise ModelError(f"layer_types holds {sorted(unknown)}, which is not supported")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = 0 if always else _integer(config, "max_window_layers")
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _rope_scaling(
    rope: Mapping[str, Any], config: Mapping[str, Any], max_position: int
) -> RopeScaling | None:
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError("rope_parameters by layer type are not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if config["model_type"] == "phi3" and kind == "yarn":
        kind = "longrope"  # what the first of Phi-3 mean by it
    original = config.get("original_max_position_embeddings")
    if original is None:
        original = rope.get("original_max_position_embeddings")
    original_max_position = max_position if original is None else int(original)
    match kind:
        case "default":
            return None
        case "linear":
            scaling = RopeScaling("linear", _number(rope, "factor"))
        case "llama3":
            scaling = RopeScaling(
                "llama3",
                _number(rope, "factor"),
                original_max_position,
                low_freq_factor=_number(rope, "low_freq_factor"),
                high_freq_factor=_number(rope, "high_freq_factor"),
            )
        case "yarn":
            scaling = RopeScaling(
                "yarn",
                _number(rope, "factor", max_position / original_max_position),
                original_max_position,
                beta_fast=_optional(rope, "beta_fast") or 32.0,
                beta_slow=_optional(rope, "beta_slow") or 1.0,
                attention_factor=_optional(rope, "attention_factor"),
                mscale=_optional(rope, "mscale"),
                mscale_all_dim=_optional(rope, "mscale_all_dim"),
                truncate=bool(rope.get("truncate", True)),
            )
        case "dynamic":  # transformers looks at no other original length here
            scaling = RopeScaling("dynamic", _number(rope, "factor"), max_position)
            if scaling.factor < 1:
                raise ModelError(f"rope factor is {scaling.factor}, must be 1 or more")
        case "longrope" | "su":  # its name in the first of Phi-3
            scaling = RopeScaling(
                "longrope",
                _number(rope, "factor", max_position / original_max_position),
                original_max_position,
                attention_factor=_optional(rope, "attention_factor"),
                short_factors=_numbers(rope, "short_factor"),
                long_factors=_numbers(rope, "long_factor"),
            )
        case _:
            raise ModelError(
                f"rope type {kind!r} is not supported; supported are default, linear, llama3, "
                "yarn, dynamic, longrope"
            )
    if not scaling.factor > 0:
        raise ModelError(f"rope factor is {scaling.factor}, must be above 0")
    return scaling
