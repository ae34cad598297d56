"""Weights of a model whose KV heads are shared as a plan says. Called once, at load.

One head stands for a cluster of them. Of the values of its heads it keeps the directions in which
they vary most: `v = sum(U[h].T @ v[h])`, and what reads head h is multiplied by `U[h]`. Keys are
turned by their position, in pairs of dimensions, so a pair can be joined only with the same pair of
another head, as a complex number: `k = sum(conj(u[h]) * k[h])`, and queries of head h are
multiplied by `conj(u[h])`. Heads that are alike, or turned or scaled copies of each other, lose
nothing. Where keys are normalised after their projection they are averaged.

Source:
    GQA (Ainslie et al., arXiv 2305.13245, section 2.1) takes the mean of the heads and trains on.
    Without training that is far worse (docs/performance.md), and so is taking one of them. Joining
    by principal components is memd's own; what DeepSeek-V2 (arXiv 2405.04434) learns is akin.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from memd.models.config import ModelConfig
from memd.models.head_plan import HeadPlan, LayerClusters, joined


def share_heads(tensors: dict[str, Tensor], config: ModelConfig, plan: HeadPlan) -> ModelConfig:
    """Join the key and value heads of each cluster, and order query heads by cluster.

    Args:
        tensors: Of the whole model, by canonical name; changed in place, layer by layer.
        config: Of the model as it is.
        plan: For this model.

    Returns:
        What the model is now, see `HeadPlan.config`.

    Raises:
        ModelError: the plan is for a model of another shape.
    """
    shared = plan.config(config)
    for layer in range(config.num_layers):
        _share_layer(tensors, f"layers.{layer}.self_attn.", config, plan, layer)
    return shared


def _share_layer(
    tensors: dict[str, Tensor], prefix: str, config: ModelConfig, plan: HeadPlan, layer: int
) -> None:
    clusters, group = plan.clusters[layer], config.group_size
    device = tensors[f"{prefix}o_proj.weight"].device
    bases, factors = (each.to(device) for each in _parts(plan, layer))
    sizes = {head: len(members) for members in clusters for head in members}
    weights = torch.tensor([1 / sizes[head] for head in range(len(bases))], device=device)
    order = _query_order(clusters, group, plan.largest)

    def queries(heads: Tensor) -> Tensor:
        return _reordered(_turned(heads, factors.repeat_interleave(group, 0)), order)

    def keys(heads: Tensor) -> Tensor:
        turned, pairs = _turned(heads, factors), plan.key_pairs
        turned[:, 2 * pairs :] *= weights[:, None, None]
        return _sums(turned, clusters)

    def values(heads: Tensor) -> Tensor:
        return _sums(bases.transpose(1, 2) @ heads, clusters)

    def outputs(heads: Tensor) -> Tensor:
        return _reordered(bases.repeat_interleave(group, 0).transpose(1, 2) @ heads, order)

    for name, change in (("q_proj", queries), ("k_proj", keys), ("v_proj", values)):
        for kind in ("weight", "bias"):
            key = f"{prefix}{name}.{kind}"
            if key in tensors:
                tensors[key] = _by_head(tensors[key], config.head_dim, change)
    key = f"{prefix}o_proj.weight"
    tensors[key] = _by_head(tensors[key].t(), config.head_dim, outputs).t().contiguous()


def _by_head(rows: Tensor, head_dim: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change [heads * head_dim, ...] as float32 [heads, head_dim, columns]."""
    heads = rows.float().reshape(-1, head_dim, rows[0].numel())
    return change(heads).reshape(-1, *rows.shape[1:]).to(rows.dtype)


def _parts(plan: HeadPlan, layer: int) -> tuple[Tensor, Tensor]:
    """Bases of values, [heads, dim, dim], and factors of keys, [heads, key_pairs] complex.

    Heads that are alone keep what they are.
    """
    heads, dim = plan.kv_heads_before, plan.head_dim
    bases = torch.eye(dim).repeat(heads, 1, 1)
    factors = torch.ones((heads, plan.key_pairs), dtype=torch.complex64)
    together = joined(plan.clusters[layer])
    if together:
        bases[together] = _floats(plan.values[layer]).view(-1, dim, dim)
        if plan.key_pairs:
            pairs = _floats(plan.keys[layer]).view(-1, plan.key_pairs, 2)
            factors[together] = torch.view_as_complex(pairs)
    return bases, factors


def _floats(numbers: bytes) -> Tensor:
    return torch.frombuffer(bytearray(numbers), dtype=torch.float32)


def _turned(heads: Tensor, factors: Tensor) -> Tensor:
    """Each pair (i, i + pairs) of [heads, head_dim, columns] times the conjugate of its factor."""
    pairs = factors.shape[1]
    real, imaginary = heads[:, :pairs], heads[:, pairs : 2 * pairs]
    cos, sin = factors.real[:, :, None], factors.imag[:, :, None]
    turned = (real * cos + imaginary * sin, imaginary * cos - real * sin)
    return torch.cat((*turned, heads[:, 2 * pairs :]), 1)


def _sums(heads: Tensor, clusters: LayerClusters) -> Tensor:
    return torch.stack([heads[list(members)].sum(0) for members in clusters])


def _query_order(clusters: LayerClusters, group: int, largest: int) -> list[int | None]:
    """Old query head of each new one; None: one of zeros, where a cluster is not the largest."""
    order: list[int | None] = []
    for members in clusters:
        order += [head * group + at for head in members for at in range(group)]
        order += [None] * ((largest - len(members)) * group)
    return order


def _reordered(heads: Tensor, order: list[int | None]) -> Tensor:
    """[heads, ...] to [len(order), ...]."""
    found = heads.new_zeros((len(order), *heads.shape[1:]))
    for new, old in enumerate(order):
        if old is not None:
            found[new] = heads[old]
    return found
