"""What `memd models list` and `inspect` print: models at hand, and facts of one. No torch."""

import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from memd.errors import ModelError
from memd.models.config import RopeScaling
from memd.models.gguf_file import open_gguf
from memd.models.hub import DEMO_MODELS, ModelFiles, read_config, read_json


@dataclass(frozen=True)
class ListedModel:
    """A model that `model.path` can name."""

    name: str
    source: str  # "demo" or "hub"
    path: Path | None  # None: not fetched
    size_bytes: int  # of the files that are, or would be, in the cache


def list_models(cache: Path) -> list[ListedModel]:
    """Demo models, fetched or not, then the models in the hub's local cache.

    Args:
        cache: Root of memd's cache, `memd.config.cache_dir()`.
    """
    demos = [
        ListedModel(
            demo.name, "demo", demo.path(cache) if demo.is_fetched(cache) else None, demo.size_bytes
        )
        for demo in DEMO_MODELS.values()
    ]
    return demos + _hub_models()


def _hub_models() -> list[ListedModel]:
    # Half a second to import, and only this command scans the cache.
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        (
            ListedModel(repository.repo_id, "hub", repository.repo_path, repository.size_on_disk)
            for repository in repositories
            if repository.repo_type == "model"
        ),
        key=lambda model: model.name,
    )


def describe(files: ModelFiles) -> dict[str, Any]:
    """Facts of a model as plain data, read from headers only.

    Units:
        `*_bytes` in bytes, lengths in tokens, `parameters` and `tensor_types` in elements.

    Raises:
        ModelError: a file is damaged, or the model is not supported.
    """
    config = read_config(files)
    types, paths = _gguf_types(files.gguf) if files.gguf else _types(files.require_directory())
    windows = sorted({window for window in config.windows if window is not None})
    return {
        "name": files.name,
        "format": "gguf" if files.gguf else "safetensors",
        "architecture": config.architecture,
        "parameters": sum(types.values()),
        "tensor_types": dict(types.most_common()),
        "dtype": config.dtype,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "context_tokens": config.max_position,
        "sliding_windows": windows,
        "rope": _describe_rope(config.rope_theta, config.rope_scaling),
        "vocab_size": config.vocab_size,
        "tied_embeddings": config.tie_embeddings,
        "kv_bytes_per_token": {
            "bfloat16": config.kv_bytes_per_token(2),
            "float32": config.kv_bytes_per_token(4),
        },
        **_text_parts(files),
        "files": {path.name: path.stat().st_size for path in paths},
    }


def _describe_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"theta": theta, "kind": "default"}
    changed = {
        name: value
        for name, value in asdict(scaling).items()
        if value != getattr(RopeScaling, name, None)
    }
    return {"theta": theta, **changed}


def _gguf_types(path: Path) -> tuple[Counter[str], tuple[Path, ...]]:
    file = open_gguf(path)
    types: Counter[str] = Counter()
    for tensor in file.tensors.values():
        types[tensor.type.name] += math.prod(tensor.shape)
    return types, file.paths


def _types(directory: Path) -> tuple[Counter[str], tuple[Path, ...]]:
    paths = tuple(sorted(directory.glob("*.safetensors")))
    types: Counter[str] = Counter()
    for path in paths:
        try:
            with safe_open(path, framework="numpy") as handle:
                for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    header = handle.get_slice(name)
                    types[header.get_dtype()] += math.prod(header.get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is cut off or damaged: {error}") from None
    return types, paths


def _text_parts(files: ModelFiles) -> dict[str, bool]:
    if files.gguf is not None:
        metadata = open_gguf(files.gguf).metadata
        return {
            "has_tokenizer": "tokenizer.ggml.model" in metadata,
            "has_chat_template": "tokenizer.chat_template" in metadata,
        }
    directory = files.require_directory()
    settings = read_json(directory / "tokenizer_config.json") or {}
    return {
        "has_tokenizer": (directory / "tokenizer.json").is_file(),
        "has_chat_template": "chat_template" in settings
        or (directory / "chat_template.jinja").is_file(),
    }
