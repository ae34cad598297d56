"""Attention over plain tensors, with a gradient."""

import torch
from torch import Tensor


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None = None
) -> Tensor:
    """Attend with every token to the tokens of its own sequence. Differentiable.

    Keeps the whole matrix of weights, so memory grows with the square of S.

    Shapes:
        q: [B, S, num_heads, head_dim].
        k, v: [B, S, num_kv_heads, head_dim], the dtype of `q`; num_heads a multiple of
            num_kv_heads.
        causal: a token sees none after it.
        scale: factor of the scores before the softmax.
        window: tokens that a token sees, itself included; None: all. Needs `causal`.

    Returns:
        [B, S, num_heads, head_dim], the dtype of `q`. Computed in float32, in float64 for that.

    Raises:
        ValueError: a shape, dtype or device does not match the above.
    """
    check_flash(q, k, v, causal, window)
    group = q.shape[2] // k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    queries, keys, values = (
        x.to(wide).transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v)
    )
    scores = queries @ keys.transpose(2, 3) * scale  # [B, num_heads, S, S]
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
        if window is not None:
            seen = seen.triu(1 - window)
        scores = scores.masked_fill(~seen, -torch.inf)
    output = scores.softmax(-1) @ values.repeat_interleave(group, 1)
    return output.transpose(1, 2).to(q.dtype)


def check_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> None:
    """Refuse tensors that `flash_attention` cannot take.

    Raises:
        ValueError: a shape, dtype, device or the window does not match its description.
    """
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: not [B, S, heads, dim]"
        )
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(f"q {tuple(q.shape)} does not fit k and v {tuple(k.shape)}")
    if {k.dtype, v.dtype} != {q.dtype} or {k.device, v.device} != {q.device}:
        raise ValueError(f"q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype}")
    if window is not None and (not causal or window < 1):
        raise ValueError(f"window is {window}, causal {causal}; it needs causal and at least 1")
