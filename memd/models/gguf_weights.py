"""One tensor of a GGUF file as the decoder wants it. Needs torch, unlike the header's modules."""

import torch
from torch import Tensor

from memd.models.config import ModelConfig
from memd.models.gguf_dequantise import can_dequantise, dequantise
from memd.models.gguf_file import GgufTensor
from memd.models.upload import Uploader


def load_tensor(
    name: str,
    tensor: GgufTensor,
    config: ModelConfig,
    dtype: torch.dtype,
    uploader: Uploader | None = None,
) -> Tensor:
    """Dequantised values of a tensor in Hugging Face's row order, rounded once from float32.

    Args:
        name: Canonical.
        uploader: Brings the encoded bytes to its device, where they are decoded; without one the
            tensor is on the CPU.
    """
    if uploader is None:
        rows = torch.from_numpy(tensor.dequantise()).to(dtype)
    elif can_dequantise(tensor.type):
        rows = dequantise(uploader.upload_bytes(tensor.data), tensor.type, dtype)
    else:
        rows = uploader.upload(torch.from_numpy(tensor.dequantise())).to(dtype)
    return _reordered(name, rows.view(tensor.shape), config)


def _reordered(name: str, rows: Tensor, config: ModelConfig) -> Tensor:
    """Rows as Hugging Face has them.

    Source:
        llama.cpp's converter reorders each head's q and k rows of Llama models from halves to
        pairs, as its rotary kernel wants them; Qwen models are stored as they are.
    """
    for part, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
        if config.architecture == "llama" and f".{part}." in name:
            pairs = rows.view(heads, config.head_dim // 2, 2, *rows.shape[1:])
            return pairs.transpose(1, 2).reshape(rows.shape)
    return rows
