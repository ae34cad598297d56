"""Tensors as kernels take them, and the KV memory, in which they find pages by offset."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from memd_kernels.cpu.jit import part

Place = tuple[int, int, int, int, int]


def numbers_of(tensor: Tensor) -> Any:
    """A tensor's memory as numpy has it: of bfloat16, which numpy has not, the bits as int16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Room for numbers of a dtype; numpy has it in a third of the time that a tensor takes."""
    return np.empty(shape, np.int16 if dtype == torch.bfloat16 else np.float32)


def tensor_of(numbers: Any) -> Tensor:
    """The tensor whose `numbers_of` these are."""
    tensor = torch.from_numpy(numbers)
    return tensor.view(torch.bfloat16) if numbers.dtype == np.int16 else tensor


def place_of(kv: Tensor, layer: int) -> Place:
    """Pages in all and in a block, the strides of blocks and pages, and where the layer begins."""
    block_stride, page_stride, layer_stride = kv.stride()[:3]
    pages = kv.shape[0] * kv.shape[1]
    return pages, kv.shape[1], block_stride, page_stride, layer * layer_stride


@part
def page_offset(place: Place, page: int) -> int:
    """Where a layer of a page begins, counted from the first number of the KV memory."""
    _, per_block, block_stride, page_stride, layer = place
    return page // per_block * block_stride + page % per_block * page_stride + layer
