"""Weights from safetensors or GGUF files onto the device, checked as a whole before any is read.

Called by the engine once, at start. Tensors travel one at a time and are decoded and converted on
the device, so the host never holds a copy of the model, and the device one tensor more than it.
Pickled checkpoints are never opened: they can run code.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from memd.errors import ModelError
from memd.models import gguf_model
from memd.models.config import ModelConfig
from memd.models.fused import parts_of
from memd.models.gguf_file import GgufTensor, open_gguf
from memd.models.gguf_weights import load_tensor
from memd.models.hub import ModelFiles
from memd.models.upload import Uploader

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_FLOAT_TYPES = ("F32", "F16", "BF16", "F64")


_Rows = tuple[int, int] | None  # from, up to; None: all
_Read = Callable[[_Rows, torch.dtype, Uploader | None], Tensor]


@dataclass(frozen=True)
class _Source:
    """A tensor that can be read: its shape from the file's header, and how to get rows of it.

    What `read` returns is where the uploader brings it, or on the CPU without one. It owns its
    memory, so that a file changed later changes no weight.
    """

    shape: tuple[int, ...]
    read: _Read
    rows: _Rows = None  # of what is in the file


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor the decoder needs.

    Names are Hugging Face's without the leading `model.`; `lm_head.weight` is absent when tied.

    Shapes:
        Projections are [out_features, in_features], biases [out_features], norms [features].
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    projections = {
        "self_attn.q_proj": (q_rows, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_rows, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_rows, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q_rows, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    for layer in range(config.num_layers):
        for name, size in norms.items():
            shapes[f"layers.{layer}.{name}.weight"] = (size,)
        for name, (rows, columns, biased) in projections.items():
            shapes[f"layers.{layer}.{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"layers.{layer}.{name}.bias"] = (rows,)
    return shapes


def load_tensors(
    files: ModelFiles,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[float], None] | None = None,
) -> dict[str, Tensor]:
    """Read every tensor that `expected_shapes` names.

    Args:
        progress: Called with the share of elements loaded, 0 to 1.

    Returns:
        Canonical name -> tensor of `dtype` on `device`, owning its memory.

    Raises:
        ModelError: a file is damaged or pickled; or, all in one message, tensors are missing or of
            the wrong shape or type, or the index names a shard that is not there.
    """
    problems: list[str] = []
    device = torch.device(device)
    with ExitStack() as stack:
        if files.gguf is not None:
            where = files.gguf
            sources = _gguf_sources(files.gguf, config)
        else:
            where = files.require_directory()
            sources, problems = _safetensors_sources(where, stack)
        expected = expected_shapes(config)
        sources, misshapen = _taken_apart(sources, expected)
        problems += misshapen
        problems += _compare(expected, sources, config)
        if problems:
            raise ModelError(f"{where}: " + "; ".join(problems))
        uploader = stack.enter_context(Uploader(device)) if device.type == "cuda" else None
        total = sum(_elements(shape) for shape in expected.values())
        done = 0
        tensors: dict[str, Tensor] = {}
        for name, shape in expected.items():
            source = sources[name]
            tensors[name] = source.read(source.rows, dtype, uploader)
            done += _elements(shape)
            if progress is not None:
                progress(done / total)
    return tensors


def _elements(shape: Iterable[int]) -> int:
    return torch.Size(shape).numel()


def _taken_apart(
    sources: Mapping[str, _Source], expected: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, _Source], list[str]]:
    """Sources with the parts of fused tensors in their place, and which of these do not fit."""
    found: dict[str, _Source] = {}
    problems: list[str] = []
    for name, source in sources.items():
        parts = parts_of(name, expected)
        if not parts:
            found[name] = source
            continue
        num_rows = max(stop for _, stop in parts.values())
        if source.shape[0] != num_rows:
            expected_shape = [num_rows, *source.shape[1:]]
            problems.append(f"{name} has shape {list(source.shape)}, must be {expected_shape}")
        for part, rows in parts.items():
            if part in sources:
                problems.append(f"{part} is there twice, the second time in {name}")
            shape = expected[part][0], *source.shape[1:]
            found[part] = _Source(shape, source.read, rows)
    return found, problems


def _compare(
    expected: Mapping[str, tuple[int, ...]], sources: Mapping[str, _Source], config: ModelConfig
) -> list[str]:
    """What keeps the model from loading; tensors without a place are only logged."""
    unknown = sorted(
        name
        for name in sources.keys() - expected.keys()
        if not name.endswith("rotary_emb.inv_freq")
        and not (name == "lm_head.weight" and config.tie_embeddings)
    )
    missing = sorted(expected.keys() - sources.keys())
    problems = []
    if missing:
        problems.append(f"missing tensors: {', '.join(missing)}")
        if unknown:
            problems.append(f"tensors that have no place: {', '.join(unknown)}")
    elif unknown:
        logger.warning("tensors that have no place are not loaded: %s", ", ".join(unknown))
    problems += [
        f"{name} has shape {list(sources[name].shape)}, must be {list(shape)}"
        for name, shape in expected.items()
        if name in sources and sources[name].shape != shape
    ]
    return problems


def _gguf_sources(path: Path, config: ModelConfig) -> dict[str, _Source]:
    def reader(name: str, tensor: GgufTensor) -> _Read:
        return lambda rows, dtype, uploader: load_tensor(
            name, tensor if rows is None else tensor.part(*rows), config, dtype, uploader
        )

    tensors = gguf_model.canonical_tensors(open_gguf(path))
    return {name: _Source(tensor.shape, reader(name, tensor)) for name, tensor in tensors.items()}


def _safetensors_sources(directory: Path, stack: ExitStack) -> tuple[dict[str, _Source], list[str]]:
    paths, problems = _shards(directory)
    sources: dict[str, _Source] = {}
    for path in paths:
        try:
            handle = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is cut off or damaged: {error}") from None
        for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            header = handle.get_slice(name)
            canonical = name.removeprefix("model.")
            if canonical in sources:
                problems.append(f"{name} is there twice, the second time in {path.name}")
            if header.get_dtype() not in _FLOAT_TYPES and not name.endswith(".inv_freq"):
                problems.append(f"{name} has type {header.get_dtype()}, which is not supported")
            sources[canonical] = _Source(tuple(header.get_shape()), partial(_read, handle, name))
    return sources, problems


def _read(
    handle: Any, name: str, rows: _Rows, dtype: torch.dtype, uploader: Uploader | None
) -> Tensor:
    """Rows of a tensor of a safetensors file."""
    mapped: Tensor = handle.get_tensor(name)
    if rows is not None:
        mapped = mapped[slice(*rows)]
    if uploader is None:
        return mapped.to(dtype, copy=True)
    return uploader.upload(mapped).to(dtype)


def _shards(directory: Path) -> tuple[list[Path], list[str]]:
    """Files to open, and shards that the index names but that do not exist."""
    index = directory / _INDEX
    if not index.is_file():
        found = sorted(directory.glob("*.safetensors"))
        single = directory / "model.safetensors"
        if found:
            return ([single] if single in found else found), []
        pickled = sorted(
            path.name for kind in ("*.bin", "*.pt", "*.pth") for path in directory.glob(kind)
        )
        held = f" ({', '.join(pickled)} is not: pickles can run code)" if pickled else ""
        raise ModelError(f"{directory} has no weights: only safetensors and GGUF are read{held}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is damaged: {error!r}") from None
    missing = [name for name in names if not (directory / name).is_file()]
    problems = [f"{_INDEX} names {name}, which does not exist" for name in missing]
    return [directory / name for name in names if name not in missing], problems
