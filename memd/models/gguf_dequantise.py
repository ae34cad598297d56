"""GGUF's quantised blocks to values with torch operations, on whatever device the bytes are.

The same arithmetic as the `gguf` package, product by product in float32, so that the results are
equal bit for bit. Other encodings are left to that package, on the CPU.

Source:
    Block layouts of ggml: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

# Blocks are decoded in parts, so that intermediates stay small beside the tensor: 64 MiB each.
_PART_VALUES = 16 * 2**20


def can_dequantise(kind: Kind) -> bool:
    """Whether `dequantise` knows an encoding."""
    return kind in _DECODERS or kind in _PLAIN


def dequantise(data: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
    """Decode a tensor's bytes.

    Shapes:
        data: [num_blocks * bytes per block], uint8, contiguous.

    Returns:
        [num_values], `dtype`, on the device of `data`, rounded once from float32. May share
        memory with `data` if nothing had to be decoded.

    Raises:
        KeyError: the encoding is unknown; see `can_dequantise`.
    """
    if kind in _PLAIN:
        return data.view(_PLAIN[kind]).to(dtype)
    decode = _DECODERS[kind]
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    blocks = data.view(-1, type_size)
    values = torch.empty(len(blocks), block_size, dtype=dtype, device=data.device)
    step = _PART_VALUES // block_size
    for start in range(0, len(blocks), step):
        values[start : start + step] = decode(blocks[start : start + step])
    return values.flatten()


def _fields(blocks: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """The consecutive byte fields of blocks: each [n, size]."""
    return torch.split(blocks, list(sizes), dim=1)


def _halfs(field: Tensor) -> Tensor:
    """A field of one float16 as float32: [n, 1]."""
    return field.contiguous().view(torch.float16).float()


def _unpack(field: Tensor, bits: int) -> Tensor:
    """Parts of each byte, lowest first: [..., width] to [..., 8 // bits, width]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=field.device)
    return torch.bitwise_and(field.unsqueeze(-2) >> shifts.unsqueeze(-1), 2**bits - 1)


def _flags(field: Tensor) -> Tensor:
    """Bits in the order of a little-endian number: [n, width] to [n, 8 * width]."""
    return _unpack(field, 1).transpose(-1, -2).flatten(-2)


def _q4_0(blocks: Tensor) -> Tensor:
    scale, low = _fields(blocks, 2, 16)
    return _halfs(scale) * (_unpack(low, 4).flatten(1).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    scale, offset, low = _fields(blocks, 2, 2, 16)
    return _halfs(scale) * _unpack(low, 4).flatten(1).float() + _halfs(offset)


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    return (_unpack(low, 4).flatten(1) | _flags(high) << 4).float()


def _q5_0(blocks: Tensor) -> Tensor:
    scale, high, low = _fields(blocks, 2, 4, 16)
    return _halfs(scale) * (_five_bits(high, low) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    scale, offset, high, low = _fields(blocks, 2, 2, 4, 16)
    return _halfs(scale) * _five_bits(high, low) + _halfs(offset)


def _q8_0(blocks: Tensor) -> Tensor:
    scale, values = _fields(blocks, 2, 32)
    return _halfs(scale) * values.view(torch.int8).float()


def _q2_k(blocks: Tensor) -> Tensor:
    scales, low, scale, offset = _fields(blocks, 16, 64, 2, 2)
    factors = _halfs(scale) * (scales & 15).float()  # [n, 16], one for each 16 values
    offsets = _halfs(offset) * (scales >> 4).float()
    values = _unpack(low.unflatten(1, (2, 32)), 2).reshape(-1, 16, 16).float()
    return (factors.unsqueeze(-1) * values - offsets.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    high, low, packed_scales, scale = _fields(blocks, 32, 64, 12, 2)
    low_scales, high_scales = _fields(packed_scales, 8, 4)
    scales = _unpack(low_scales, 4).flatten(1) | _unpack(high_scales, 2).flatten(1) << 4
    factors = _halfs(scale) * (scales.float() - 32)  # [n, 16], one for each 16 values
    values = _unpack(low.unflatten(1, (2, 32)), 2).reshape(-1, 16, 16)
    values |= _unpack(high, 1).reshape(-1, 16, 16) << 2
    return (factors.unsqueeze(-1) * (values.float() - 4)).flatten(1)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight offsets of 6 bits each: the last four have their top bits apart."""
    first, second, rest = _fields(packed, 4, 4, 4)
    scales = torch.cat([first & 63, (rest & 15) | (first >> 6 << 4)], 1)
    offsets = torch.cat([second & 63, (rest >> 4) | (second >> 6 << 4)], 1)
    return scales.float(), offsets.float()


def _scaled(scale: Tensor, offset: Tensor, packed: Tensor, values: Tensor) -> Tensor:
    """Values of Q4_K and Q5_K, [n, 8, 32], with a scale and an offset for each 32."""
    scales, offsets = _six_bit_scales(packed)
    factors = _halfs(scale) * scales
    shifts = _halfs(offset) * offsets
    return (factors.unsqueeze(-1) * values.float() - shifts.unsqueeze(-1)).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    scale, offset, packed, low = _fields(blocks, 2, 2, 12, 128)
    values = _unpack(low.unflatten(1, (4, 32)), 4).reshape(-1, 8, 32)
    return _scaled(scale, offset, packed, values)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, offset, packed, high, low = _fields(blocks, 2, 2, 12, 32, 128)
    values = _unpack(low.unflatten(1, (4, 32)), 4).reshape(-1, 8, 32) | _unpack(high, 1) << 4
    return _scaled(scale, offset, packed, values)


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, scale = _fields(blocks, 128, 64, 16, 2)
    factors = _halfs(scale) * scales.contiguous().view(torch.int8).float()  # [n, 16]
    values = _unpack(low.unflatten(1, (2, 64)), 4).reshape(-1, 16, 16)
    values = values | _unpack(high.unflatten(1, (2, 32)), 2).reshape(-1, 16, 16) << 4
    return (factors.unsqueeze(-1) * (values.float() - 32)).flatten(1)


_PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_DECODERS: dict[Kind, Callable[[Tensor], Tensor]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q2_K: _q2_k,
    Kind.Q3_K: _q3_k,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}
