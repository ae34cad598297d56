"""A small KV memory with everything that can go wrong in it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

MakeKV = Callable[..., Tensor]


@pytest.fixture
def make_kv() -> MakeKV:
    """Builds kv of NaN: [num_blocks, pages_per_block, layers, 2, kv_heads, page_tokens, head_dim].

    `waste` elements are left over at the end of each block; the storage starts off the tensor.
    """

    def make(
        num_blocks: int = 5,
        pages_per_block: int = 3,
        num_layers: int = 2,
        num_kv_heads: int = 2,
        page_tokens: int = 4,
        head_dim: int = 8,
        waste: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        page = (num_layers, 2, num_kv_heads, page_tokens, head_dim)
        numel = pages_per_block * torch.Size(page).numel()
        memory = torch.full((num_blocks * (numel + waste) + 5,), torch.nan, dtype=dtype)
        blocks = memory[5:].view(num_blocks, numel + waste)
        return blocks[:, :numel].unflatten(1, (pages_per_block, *page))

    return make
