"""Arguments of the kernels that may read packed pages, as they are launched and compiled."""

from typing import Any

import torch

from memd_kernels import launch
from memd_kernels.formats import FormatName, PackedFormat, PackedPages

FP8_CAPABILITY = (8, 9)


def packed_arguments(packed: PackedPages | None, kv: torch.Tensor) -> dict[str, Any]:
    """Arguments of a kernel that may read packed pages; without any, FORMAT is `full`.

    Raises:
        ValueError: the device has no instructions for the format.
    """
    if packed is None:
        strides = dict.fromkeys(("packed_block", "packed_page", "packed_layer"), 0)
        return {"packed": kv, **strides, **packed_constants(None, 0, 0), "FAST": False}
    check_device(packed)
    memory, format = packed.memory, packed.format
    block_stride, page_stride, layer_stride = memory.stride()[:3]
    return {
        "packed": memory,
        "packed_block": block_stride,
        "packed_page": page_stride,
        "packed_layer": layer_stride,
        **packed_constants(format.name, format.page_tokens, format.head_dim),
        "PACKED_PER_BLOCK": memory.shape[1],
        "FAST": packed.is_cuda and kv.dtype != torch.float32,
    }


def packed_constants(name: FormatName | None, page_tokens: int, head_dim: int) -> dict[str, Any]:
    """Constants of such a kernel, as they are compiled for cards that are not there."""
    if name is None:
        numbers = dict.fromkeys(("PACKED_PER_BLOCK", "GROUP_TOKENS", "HEAD_BYTES"), 1)
        return {"FORMAT": "full", **numbers, "PARTS": (0,) * 7, "FAST": False}
    format = PackedFormat(name, page_tokens, head_dim)
    return {
        "FORMAT": name,
        "PACKED_PER_BLOCK": 28,
        "GROUP_TOKENS": format.group_tokens,
        "HEAD_BYTES": format.head_bytes,
        "PARTS": tuple(format.parts),
        "FAST": True,
    }


def packed_signature(name: FormatName | None) -> dict[str, str]:
    """Types of such a kernel's arguments."""
    strides = ("packed_block", "packed_page", "packed_layer")
    if name is None:
        return {"packed": "*bf16:16", **dict.fromkeys(strides, "i32:16")}
    return {"packed": "*u8:16", **dict.fromkeys(strides, "i64:16")}


def check_device(packed: PackedPages) -> None:
    """Raise ValueError where the device has no instructions for the format."""
    capability = launch.capability(packed.memory.device)
    if packed.format.name == "fp8" and packed.is_cuda and capability < FP8_CAPABILITY:
        raise ValueError(
            "page format is fp8, which takes compute capability 8.9; this device has {}.{}".format(
                *capability
            )
        )
