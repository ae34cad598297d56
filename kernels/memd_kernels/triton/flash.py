"""Attention over plain tensors with a backward pass that recomputes the weights, in Triton.

Memory is linear in the length: the forward pass keeps one number for each row, the logarithm of the
sum of its weights. There are no atomic additions, so results are the same bits every time.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from memd_kernels import launch as tables
from memd_kernels.launch import LaunchConfig
from memd_kernels.reference.flash import check_flash
from memd_kernels.triton.flash_backward import (
    delta_kernel,
    key_value_gradient_kernel,
    query_gradient_kernel,
)
from memd_kernels.triton.flash_forward import forward_kernel

LOG2_E = 1.4426950408889634
DELTA_ROWS = 32


class FlashConfig(NamedTuple):
    """Launches of the kernels for the output and for the gradients of q, and of k and v.

    `block_m` are the tokens of queries that each takes at a time, `block_n` those of keys.
    """

    forward: LaunchConfig
    query: LaunchConfig
    key_value: LaunchConfig


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None = None
) -> Tensor:
    """Attend with every token to the tokens of its own sequence. Differentiable.

    Shapes:
        q: [B, S, num_heads, head_dim], float16, bfloat16 or float32; head_dim a multiple of 8 up to
            256.
        k, v: [B, S, num_kv_heads, head_dim], the dtype of `q`; num_heads a multiple of
            num_kv_heads.
        causal: a token sees none after it.
        scale: factor of the scores before the softmax, positive.
        window: tokens that a token sees, itself included; None: all. Needs `causal`.

    Returns:
        [B, S, num_heads, head_dim], the dtype of `q`. Softmax and sums are in float32.

    Raises:
        ValueError: a shape, dtype or device does not match the above.

    Cost:
        Beside the gradients, the backward pass needs 8 bytes for each row of each head.

    Source:
        FlashAttention-2 (arXiv 2307.08691). The kernels are our own.
    """
    check_flash(q, k, v, causal, window)
    head_dim = q.shape[3]
    if head_dim % 8 or not 8 <= head_dim <= 256:
        raise ValueError(f"head_dim is {head_dim}, not a multiple of 8 up to 256")
    return attend(q, k, v, causal, scale, window, default_config(q))


def default_config(q: Tensor) -> FlashConfig:
    """Launches for the dtype and head_dim of `q` on its device."""
    kernels = "flash_forward", "flash_query_gradient", "flash_key_value_gradient"
    return FlashConfig(
        *(
            tables.config(
                kernel,
                tables.capability(q.device),
                head_dim=_padded_dim(q),
                format="float32" if q.dtype == torch.float32 else "half",
            )
            for kernel in kernels
        )
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    config: FlashConfig,
) -> Tensor:
    """`flash_attention` without its checks and with given tiles, for tuning."""
    result: Tensor = _Flash.apply(q, k, v, causal, scale, window, config)
    return result


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        window: int | None,
        config: FlashConfig,
    ) -> Tensor:
        q, k, v = _aligned(q), _aligned(k), _aligned(v)
        batch, length, heads, _ = q.shape
        out = torch.empty_like(q)
        log_sums = torch.empty((batch, heads, length), dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.settings = causal, scale, window, config
        if q.numel():
            tile = config.forward
            forward_kernel[_grid(q, tile.block_m)](
                _tiles(q, tile.block_m),
                _tiles(k, tile.block_n),
                _tiles(v, tile.block_n),
                _tiles(out, tile.block_m),
                log_sums,
                length,
                scale * LOG2_E,
                window or 0,
                **_shape(q, k),
                **_settings(tile, causal, window),
            )
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums = ctx.saved_tensors
        causal, scale, window, config = ctx.settings
        d_out = _aligned(gradients[0])
        d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        if q.numel():
            deltas = torch.empty_like(log_sums)
            shape, length, rows = _shape(q, k), q.shape[1], DELTA_ROWS
            delta_kernel[_grid(q, rows)](
                _tiles(out, rows),
                _tiles(d_out, rows),
                deltas,
                length,
                **{name: value for name, value in shape.items() if name != "GROUP"},
                ROWS=rows,
            )
            scales = scale * LOG2_E, scale, window or 0
            for kernel, tile, grid, results in (
                (query_gradient_kernel, config.query, _grid(q, config.query.block_m), (d_q,)),
                (
                    key_value_gradient_kernel,
                    config.key_value,
                    _grid(k, config.key_value.block_n),
                    (d_k, d_v),
                ),
            ):
                result_tokens = tile.block_m if results[0] is d_q else tile.block_n
                kernel[grid](
                    _tiles(q, tile.block_m),
                    _tiles(k, tile.block_n),
                    _tiles(v, tile.block_n),
                    _tiles(d_out, tile.block_m),
                    log_sums,
                    deltas,
                    *(_tiles(result, result_tokens) for result in results),
                    length,
                    *scales,
                    **shape,
                    **_settings(tile, causal, window),
                )
        return d_q, d_k, d_v, None, None, None, None


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, and on 16 bytes, as descriptors must be."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _padded_dim(x: Tensor) -> int:
    return max(16, int(triton.next_power_of_2(x.shape[3])))


def _has_tma(x: Tensor) -> bool:
    return not x.is_cuda or tables.capability(x.device) >= (9, 0)


def _tiles(x: Tensor, tokens: int) -> Tensor | TensorDescriptor:
    """What kernels take for a tensor, of which they read or write `tokens` at a time.

    In descriptors the axes of length 1 lead: only then does Triton drop them without a copy.
    """
    if not _has_tma(x):
        return x
    return TensorDescriptor.from_tensor(x.transpose(1, 2), [1, 1, tokens, _padded_dim(x)])


def _grid(x: Tensor, tile_tokens: int) -> tuple[int, int]:
    return triton.cdiv(x.shape[1], tile_tokens), x.shape[0] * x.shape[2]


def _shape(q: Tensor, k: Tensor) -> dict[str, int]:
    return {
        "HEADS": q.shape[2],
        "GROUP": q.shape[2] // k.shape[2],
        "HEAD_DIM": q.shape[3],
        "PADDED_DIM": _padded_dim(q),
        "TMA": _has_tma(q),
    }


def _settings(tile: LaunchConfig, causal: bool, window: int | None) -> dict[str, int]:
    return {
        "ROWS": tile.block_m,
        "KEYS": tile.block_n,
        "CAUSAL": causal,
        "HAS_WINDOW": window is not None,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }
