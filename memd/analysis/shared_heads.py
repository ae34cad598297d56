"""Finding KV heads that one head could stand for, and measuring what that costs.

The first half of a text tells how alike heads are and how they are joined, the second half what
that costs. Called by `memd analyse-heads`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memd.analysis.attention_patterns import PatternSimilarity
from memd.analysis.clusters import Similarity, cluster, mean_similarity
from memd.analysis.joint_heads import joint_heads
from memd.analysis.text_pass import run_text
from memd.automatic import PAGE_TOKENS
from memd.evaluate.compare import compare
from memd.evaluate.policy import KVPolicy
from memd.evaluate.sequence import PagedSequence
from memd.models.checkpoint import load_tensors
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder
from memd.models.head_plan import HeadPlan, LayerClusters, key_pairs, weights_digest
from memd.models.hub import ModelFiles
from memd.models.shared_heads import share_heads

MIN_TOKENS = 64


@dataclass(frozen=True)
class Option:
    """One number of KV heads that a model could have."""

    kv_heads: int
    query_heads: int
    clusters: tuple[LayerClusters, ...]
    least_similarity: float  # of two heads put together, as linkage has it
    mean_similarity: float  # over all clusters of more than one head


def options(similarities: list[Similarity], group: int) -> list[Option]:
    """Every number of KV heads below the model's, most heads first.

    Clusters are as even as the number allows, because kernels need groups of one size: no cluster
    has more heads than the mean, rounded up.
    """
    heads = len(similarities[0])
    found = []
    for count in range(heads - 1, 0, -1):
        largest = -(-heads // count)
        clusters = tuple(tuple(cluster(each, count, largest=largest)) for each in similarities)
        alike = [
            mean_similarity(similarity, members)
            for similarity, layer in zip(similarities, clusters, strict=True)
            for members in layer
            if len(members) > 1
        ]
        most = max(len(members) for layer in clusters for members in layer)
        found.append(
            Option(count, count * most * group, clusters, min(alike), sum(alike) / len(alike))
        )
    return found


def choose(found: list[Option], threshold: float) -> Option | None:
    """The fewest heads of which every cluster is at least so similar; None: there is none."""
    fine = [option for option in found if option.least_similarity >= threshold]
    return min(fine, key=lambda option: option.kv_heads, default=None)


@dataclass(frozen=True)
class Found:
    """What an analysis found.

    Args:
        config: Of the model as it is.
        element_bytes: Of a number of its KV.
        similarities: Of the KV heads of each layer.
        options: See `options`.
        chosen: Of the options; None: no heads are alike enough.
        plan: Of the chosen one.
        compared_tokens: Of the first half of the text.
        measured_tokens: Of the second half, which the perplexities are of.
        perplexity: Of the model as it is.
        shared_perplexity: With the plan applied.
    """

    config: ModelConfig
    element_bytes: int
    similarities: list[Similarity]
    options: list[Option]
    chosen: Option | None
    plan: HeadPlan | None
    compared_tokens: int
    measured_tokens: int
    perplexity: float
    shared_perplexity: float | None


def perplexity(
    decoder: Decoder, config: ModelConfig, token_ids: Tensor, dtype: torch.dtype
) -> float:
    """Of a text, [T] int64 on the decoder's device, T at least 2."""
    device = token_ids.device
    page_tokens = PAGE_TOKENS[device.type]
    (full,) = compare(decoder, config, token_ids.tolist(), [], page_tokens, dtype, device)
    return full.perplexity


class HeadAnalysis:
    """One analysis of one model.

    Args:
        files: Of the model.
        config: Of the model.
        device: Where it runs.
        dtype: In which it is computed.
        on_stage: Told what is being done, for people.
    """

    def __init__(
        self,
        files: ModelFiles,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self._files = files
        self._config = config
        self._device = device
        self._dtype = dtype
        self._on_stage = on_stage

    @torch.inference_mode()
    def run(self, token_ids: list[int], threshold: float, kv_heads: int | None = None) -> Found:
        """Compare heads, choose, join, measure.

        Args:
            token_ids: Of the text, at least MIN_TOKENS.
            threshold: Least mean similarity of heads that are put together.
            kv_heads: How many are to be left, instead of as few as the threshold allows; below the
                model's.

        Raises:
            ModelError: the model's files cannot be read.
        """
        half = len(token_ids) // 2
        tokens = torch.tensor(token_ids, device=self._device)
        page_tokens = PAGE_TOKENS[self._device.type]
        sequence = PagedSequence(
            self._config, KVPolicy(), page_tokens, half, self._dtype, self._device
        )
        patterns = PatternSimilarity(self._config, sequence.kv)
        self._on_stage("loading the model")
        similarities: list[Similarity] = []

        def watch(layer: int, queries: Tensor) -> None:
            if not similarities:
                patterns.add(layer, queries)

        decoder = Decoder(self._config, self._tensors(), self._device, on_queries=watch)
        self._on_stage(f"comparing heads over {half} tokens")
        run_text(decoder, tokens[:half], sequence)
        similarities += patterns.result()
        self._on_stage(f"measuring the model as it is over {len(tokens) - half} tokens")
        base = perplexity(decoder, self._config, tokens[half:], self._dtype)
        del decoder
        found = options(similarities, self._config.group_size)
        chosen = (
            choose(found, threshold)
            if kv_heads is None
            else next(option for option in found if option.kv_heads == kv_heads)
        )
        plan = shared = None
        if chosen is not None:
            plan = self._plan(chosen, sequence.kv)
            self._on_stage(f"measuring it with {chosen.kv_heads} KV heads")
            tensors = self._tensors()
            config = share_heads(tensors, self._config, plan)
            decoder = Decoder(config, tensors, self._device)
            shared = perplexity(decoder, config, tokens[half:], self._dtype)
            told = {"perplexity": base, "shared_perplexity": shared, "tokens": len(tokens) - half}
            plan = replace(plan, measured=told)
        return Found(
            *(self._config, self._dtype.itemsize, similarities, found, chosen, plan),
            *(half, len(tokens) - half, base, shared),
        )

    def _tensors(self) -> dict[str, Tensor]:
        return load_tensors(self._files, self._config, self._dtype, self._device)

    def _plan(self, option: Option, kv: Tensor) -> HeadPlan:
        pairs = key_pairs(self._config)
        parts = []
        for layer, clusters in enumerate(option.clusters):
            keys, values = kv[0, :, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)
            parts.append(joint_heads(keys, values, clusters, pairs))
        return HeadPlan(
            model=self._files.name,
            weights=weights_digest(self._files),
            kv_heads_before=self._config.num_kv_heads,
            head_dim=self._config.head_dim,
            key_pairs=pairs,
            clusters=option.clusters,
            values=tuple(each for each, _ in parts),
            keys=tuple(each for _, each in parts),
        )
