"""Which KV heads of a model are shared: a plan, and the file that holds it.

`memd analyse-heads --out FILE` writes one, `model.shared_heads: FILE` serves with it. Imports no
torch; what a plan does to weights is told by `memd.models.shared_heads`.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memd.errors import ModelError
from memd.models.config import ModelConfig
from memd.models.hub import ModelFiles

FORMAT = "memd-shared-heads"
VERSION = 1
MAX_FILE_BYTES = 2**30
_MOST = 4096  # heads, or dimensions of one
_SAMPLES, _SAMPLE_BYTES = 64, 4096

LayerClusters = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class HeadPlan:
    """Clusters of KV heads for every layer; each cluster is served by one head.

    Args:
        model: Name of the model it was made for, for people.
        weights: Digest of its weights, see `weights_digest`.
        kv_heads_before: KV heads of each layer of the model.
        head_dim: Of each head.
        key_pairs: Rotated pairs of dimensions that `keys` turns; the rest of a key is averaged.
        clusters: For each layer the same number of clusters; together they hold each head once.
        values: For each layer float32, little-endian, [joined heads, head_dim, head_dim]: see
            `memd.models.shared_heads`. Joined are the heads of clusters with more than one, in
            their order.
        keys: Likewise [joined heads, key_pairs, 2], real and imaginary parts.
        measured: What the analysis found, for people.
    """

    model: str
    weights: str
    kv_heads_before: int
    head_dim: int
    key_pairs: int
    clusters: tuple[LayerClusters, ...]
    values: tuple[bytes, ...]
    keys: tuple[bytes, ...]
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def kv_heads(self) -> int:
        """KV heads of each layer when it is applied."""
        return len(self.clusters[0])

    @property
    def largest(self) -> int:
        """Heads of the largest cluster."""
        return max(len(each) for layer in self.clusters for each in layer)

    @property
    def digest(self) -> str:
        """Of what is shared; part of every namespace."""
        digest = hashlib.blake2b(json.dumps(self.clusters).encode(), digest_size=8)
        for numbers in (*self.values, *self.keys):
            digest.update(numbers)
        return digest.hexdigest()

    def summary(self) -> dict[str, Any]:
        """What is shared, for operators."""
        return {"kv_heads_before": self.kv_heads_before, "digest": self.digest, **self.measured}

    def config(self, config: ModelConfig) -> ModelConfig:
        """What the model is when the plan is applied.

        Kernels map query heads to KV heads by groups of one size, that of the largest cluster;
        smaller ones are filled up with query heads of zeros, which add nothing.

        Raises:
            ModelError: the plan is for a model of another shape.
        """
        planned = (len(self.clusters), self.kv_heads_before, self.head_dim)
        there = (config.num_layers, config.num_kv_heads, config.head_dim)
        if planned != there or self.key_pairs != key_pairs(config):
            raise ModelError(
                f"the plan of shared heads is for {self.model}, {_shape(planned)}; this model has "
                f"{_shape(there)}"
            )
        query_heads = self.kv_heads * self.largest * config.group_size
        return replace(config, num_heads=query_heads, num_kv_heads=self.kv_heads)

    def require_weights(self, files: ModelFiles) -> None:
        """Raises ModelError unless it was made for these weights."""
        if weights_digest(files) != self.weights:
            raise ModelError(
                f"the plan of shared heads is for other weights of the same shape, those of "
                f"{self.model}: run memd analyse-heads on this model"
            )


def head_plan_for(given: str | None, files: ModelFiles, config: ModelConfig) -> HeadPlan | None:
    """The plan that a setting names, checked against the model; None: it names none.

    Raises:
        ModelError: it cannot be read, or is of another model; the message begins with the file.
    """
    if given is None:
        return None
    path = Path(given).expanduser()
    plan = read_plan(path)
    try:
        plan.config(config)
        plan.require_weights(files)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    return plan


def key_pairs(config: ModelConfig) -> int:
    """Pairs of a key's dimensions that can be turned together; none where keys are normalised."""
    return 0 if config.qk_norm else config.rope_dim // 2


def joined(clusters: LayerClusters) -> list[int]:
    """Heads of a layer that are put together with others, in the order of clusters."""
    return [head for members in clusters if len(members) > 1 for head in members]


def weights_digest(files: ModelFiles) -> str:
    """Identifies weights by size and samples of their files, wherever and whenever they lie.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in weight_files(files):
        try:
            with path.open("rb") as file:
                size_bytes = path.stat().st_size
                digest.update(b"%d" % size_bytes)
                for sample in range(_SAMPLES):
                    file.seek(size_bytes * sample // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def weight_files(files: ModelFiles) -> list[Path]:
    """The files that hold weights, in order."""
    if files.gguf:
        return [files.gguf]
    return sorted(files.require_directory().glob("*.safetensors"))


def write_plan(plan: HeadPlan, path: Path) -> None:
    """Write a plan file.

    Raises:
        ModelError: it cannot be written.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "model": plan.model,
        "weights": plan.weights,
        "kv_heads_before": plan.kv_heads_before,
        "kv_heads": plan.kv_heads,
        "head_dim": plan.head_dim,
        "key_pairs": plan.key_pairs,
        "measured": plan.measured,
        "clusters": plan.clusters,
        "values": [base64.b64encode(numbers).decode() for numbers in plan.values],
        "keys": [base64.b64encode(numbers).decode() for numbers in plan.keys],
    }
    try:
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error.strerror}") from None


def read_plan(path: Path) -> HeadPlan:
    """Read a plan file.

    Raises:
        ModelError: it is not there or not valid; the message names file, field and value.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(f"{path} is no plan of shared heads: over {MAX_FILE_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is no plan of shared heads: it is not JSON") from None
    try:
        return _plan(content)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _plan(content: Any) -> HeadPlan:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ModelError(f'no plan of shared heads: "format" must be "{FORMAT}"')
    version = content.get("version")
    if version != VERSION:
        raise ModelError(f"version is {version!r}, this memd reads {VERSION}")
    for name in ("model", "weights"):
        if not isinstance(content.get(name), str):
            raise ModelError(f"{name} is {content.get(name)!r}, must be text")
    before = _number(content, "kv_heads_before", 1)
    head_dim, pairs = _number(content, "head_dim", 1), _number(content, "key_pairs", 0)
    if 2 * pairs > head_dim:
        raise ModelError(f"key_pairs is {pairs}, must be at most half of head_dim, {head_dim}")
    layers, measured = content.get("clusters"), content.get("measured", {})
    if not isinstance(measured, dict):
        raise ModelError(f"measured is {type(measured).__name__}, must be an object")
    if not isinstance(layers, list) or not layers:
        raise ModelError("clusters must be a list with an entry for each layer")
    clusters = tuple(_layer(each, at, before) for at, each in enumerate(layers))
    counts = {len(layer) for layer in clusters}
    if counts != {content.get("kv_heads")}:
        raise ModelError(
            f"clusters has layers of {_or(counts)} clusters, kv_heads is "
            f"{content.get('kv_heads')!r}: all layers must have as many"
        )
    return HeadPlan(
        content["model"],
        content["weights"],
        before,
        head_dim,
        pairs,
        clusters,
        _numbers(content, "values", clusters, head_dim * head_dim),
        _numbers(content, "keys", clusters, 2 * pairs),
        measured,
    )


def _number(content: dict[str, Any], name: str, least: int) -> int:
    value = content.get(name)
    if type(value) is not int or not least <= value <= _MOST:
        raise ModelError(f"{name} is {str(value)[:40]}, must be a number from {least} to {_MOST}")
    return value


def _numbers(
    content: dict[str, Any], name: str, clusters: tuple[LayerClusters, ...], count: int
) -> tuple[bytes, ...]:
    """`count` float32 for each joined head, layer by layer."""
    texts = content.get(name)
    if not isinstance(texts, list) or len(texts) != len(clusters):
        raise ModelError(f"{name} must be a list with an entry for each of {len(clusters)} layers")
    found = []
    for at, (text, layer) in enumerate(zip(texts, clusters, strict=True)):
        try:
            numbers = base64.b64decode(text, validate=True)
        except (TypeError, ValueError):
            raise ModelError(f"{name}[{at}] is not base64") from None
        needed_bytes = 4 * count * len(joined(layer))
        if len(numbers) != needed_bytes:
            raise ModelError(f"{name}[{at}] has {len(numbers)} bytes, must have {needed_bytes}")
        if not all(map(math.isfinite, memoryview(numbers).cast("f"))):
            raise ModelError(f"{name}[{at}] has numbers that are not finite")
        found.append(numbers)
    return tuple(found)


def _layer(layer: Any, at: int, heads: int) -> LayerClusters:
    fine = isinstance(layer, list) and all(isinstance(each, list) for each in layer)
    members = [head for each in layer for head in each] if fine else []
    if any(type(head) is not int for head in members) or sorted(members) != list(range(heads)):
        raise ModelError(
            f"clusters[{at}] is {json.dumps(layer)[:80]}, must hold each head from 0 to "
            f"{heads - 1} once"
        )
    if not all(layer):
        raise ModelError(f"clusters[{at}] has an empty cluster")
    return tuple(tuple(each) for each in layer)


def _shape(numbers: tuple[int, int, int]) -> str:
    layers, heads, head_dim = numbers
    return f"{layers} layers of {heads} KV heads of {head_dim}"


def _or(counts: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(counts)))
