"""How alike the KV heads of each layer are, by what their query heads attend to."""

import torch
from torch import Tensor

from memd.models.config import ModelConfig


class PatternSimilarity:
    """Adds up the similarity of each pair of KV heads while a text is run.

    The pattern of a KV head at a position is the mean over its query heads of their attention
    distributions; two heads are as similar as the cosine of their patterns, averaged over
    positions.
    The first key is left out: in most models it takes what attention has to spare, in all heads.

    Args:
        config: Of the model.
        kv: Where its keys are, the full pages of a `PagedSequence`.

    Source:
        Grouping of heads after GQA (Ainslie et al., arXiv 2305.13245); attention sinks: Xiao et
        al. (arXiv 2309.17453).
    """

    def __init__(self, config: ModelConfig, kv: Tensor) -> None:
        self._config = config
        self._kv = kv
        heads = config.num_kv_heads
        shape = (config.num_layers, heads, heads)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=kv.device)
        self._counts = torch.zeros(shape, dtype=torch.float64, device=kv.device)
        self._done = [0] * config.num_layers

    def add(self, layer: int, queries: Tensor) -> None:
        """Take the rotated queries of the next chunk, [T, num_heads, head_dim]."""
        start = self._done[layer]
        self._done[layer] = end = start + len(queries)
        patterns = self._patterns(layer, queries.float(), start, end)[:, :, 1:]
        lengths = patterns.norm(dim=2)
        known = (lengths > 0).double()  # nothing but the first key: nothing to compare
        unit = patterns / lengths.clamp(min=torch.finfo(lengths.dtype).tiny)[:, :, None]
        self._sums[layer] += (unit @ unit.transpose(1, 2)).double().sum(0)
        self._counts[layer] += known.t() @ known

    def _patterns(self, layer: int, queries: Tensor, start: int, end: int) -> Tensor:
        """[T, num_kv_heads, end]."""
        config = self._config
        keys = self._kv[0, :, layer, 0].transpose(0, 1).flatten(1, 2)[:, :end].float()
        grouped = queries.unflatten(1, (config.num_kv_heads, config.group_size))
        scores = torch.einsum("tkgd,knd->tkgn", grouped, keys) * config.head_dim**-0.5
        position = torch.arange(start, end, device=queries.device)[:, None]
        key = torch.arange(end, device=queries.device)[None]
        hidden = key > position
        window = config.windows[layer]
        if window is not None:
            hidden |= key <= position - window
        scores.masked_fill_(hidden[:, None, None], float("-inf"))
        patterns: Tensor = scores.softmax(-1).mean(2)
        return patterns

    def result(self) -> list[list[list[float]]]:
        """For each layer [num_kv_heads][num_kv_heads], 0 to 1; 0 where nothing was compared."""
        found: list[list[list[float]]] = (self._sums / self._counts.clamp(min=1)).tolist()
        return found
