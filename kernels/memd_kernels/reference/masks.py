"""What queries of a prompt see, as masks that are added to scores."""

import torch
from torch import Tensor

QUERY_TILE = 64  # rows that share one mask: bounds its size, and skips most keys after a row


def causal_mask(keys: int, window: int | None, q: Tensor) -> Tensor:
    """Mask [QUERY_TILE, keys], of zeros and -inf, for queries that are the last of the keys.

    Its last rows and columns are the mask of fewer queries and keys.
    """
    hidden = torch.ones(QUERY_TILE, keys, dtype=torch.bool, device=q.device)
    hidden = hidden.triu_(keys - QUERY_TILE + 1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril_(keys - QUERY_TILE - window)
    return q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def sink_mask(
    position: int, leading: int, low: int, high: int, window: int | None, q: Tensor
) -> Tensor:
    """Mask [queries, leading + high - low], of zeros and -inf, for queries [position, high) over
    the leading tokens and tokens [low, high).
    """
    at = torch.arange(position, high, device=q.device)[:, None]
    key_at = torch.arange(leading + high - low, device=q.device)
    behind = key_at < leading
    key_at = torch.where(behind, key_at, key_at - leading + low)
    seen = (key_at <= at) & (behind | (key_at > at - (window or high)))
    return torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)
