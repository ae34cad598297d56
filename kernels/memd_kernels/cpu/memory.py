"""The KV memory as one row of numbers, in which kernels find pages by offset."""

from typing import Any

import torch
from torch import Tensor

from memd_kernels.cpu.jit import part

Place = tuple[int, int, int, int, int]


def numbers_of(tensor: Tensor) -> Any:
    """A tensor's memory as numpy has it: of bfloat16, which numpy has not, the bits as int16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def flat_memory(kv: Tensor) -> Any:
    """The numbers of `kv` from its first to its last, as a numpy array that aliases them."""
    last = sum((size - 1) * stride for size, stride in zip(kv.shape, kv.stride(), strict=True))
    return numbers_of(kv.as_strided((last + 1,), (1,)))


def place_of(kv: Tensor, layer: int) -> Place:
    """Pages in all and in a block, the strides of blocks and pages, and where the layer begins."""
    block_stride, page_stride, layer_stride = kv.stride()[:3]
    pages = kv.shape[0] * kv.shape[1]
    return pages, kv.shape[1], block_stride, page_stride, layer * layer_stride


@part
def page_offset(place: Place, page: int) -> int:
    """Where a layer of a page begins in `flat_memory`."""
    _, per_block, block_stride, page_stride, layer = place
    return page // per_block * block_stride + page % per_block * page_stride + layer
