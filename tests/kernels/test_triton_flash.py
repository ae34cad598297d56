"""Attention over plain tensors, and its gradients, against float64."""

import pytest
import torch
from memd_kernels import reference
from memd_kernels.launch import LaunchConfig
from memd_kernels.reference.flash import flash_attention as reference_flash
from memd_kernels.triton import flash
from memd_kernels.triton.flash import FlashConfig, attend, flash_attention
from torch import Tensor

SCALE = 0.2


def inputs(
    length: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """q, k, v of two sequences, and a gradient of the output."""
    torch.manual_seed(length)
    made = [torch.randn(2, length, n, dim).to(device, dtype) for n in (heads, kv_heads, kv_heads)]
    return [x.requires_grad_() for x in made], torch.randn(2, length, heads, dim).to(device, dtype)


def check(
    out: Tensor, xs: list[Tensor], gradient: Tensor, causal: bool, window: int | None, limit: float
) -> None:
    """Compare output and gradients with those of the reference in float64."""
    wide = [x.detach().double().requires_grad_() for x in xs]
    expected = reference_flash(*wide, causal, SCALE, window)
    out.backward(gradient)
    expected.backward(gradient.double())
    torch.testing.assert_close(out.double(), expected, rtol=limit, atol=limit)
    for x, w in zip(xs, wide, strict=True):
        assert x.grad is not None
        assert w.grad is not None
        # Where a token sees one token alone, the gradients of q and k are zero.
        assert (x.grad - w.grad).norm() <= limit * (w.grad.norm() + gradient.norm())


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 1), (True, 9)])
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "dim"), [(37, 3, 1, 16), (20, 2, 2, 80), (1, 2, 1, 64)]
)
def test_matches_reference(
    device: torch.device,
    causal: bool,
    window: int | None,
    length: int,
    heads: int,
    kv_heads: int,
    dim: int,
) -> None:
    xs, gradient = inputs(length, heads, kv_heads, dim, torch.float32, device)
    out = flash_attention(*xs, causal, SCALE, window)
    check(out, xs, gradient, causal, window, 1e-5)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("rows", "keys"), [(16, 32), (32, 16), (64, 64)])
def test_every_tile_gives_the_same(
    device: torch.device, window: int | None, rows: int, keys: int
) -> None:
    xs, gradient = inputs(70, 2, 1, 16, torch.float16, device)
    tile = LaunchConfig(block_m=rows, block_n=keys)
    out = attend(*xs, True, SCALE, window, FlashConfig(tile, tile, tile))
    check(out, xs, gradient, True, window, 4e-3)


def test_pointers_give_the_same_as_descriptors(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    xs, gradient = inputs(37, 4, 2, 24, torch.float32, device)
    by_descriptor = flash_attention(*xs, True, SCALE, 20)
    monkeypatch.setattr(flash, "_has_tma", lambda x: False)
    by_pointer = flash_attention(*xs, True, SCALE, 20)
    assert torch.equal(by_pointer, by_descriptor)
    check(by_pointer, xs, gradient, True, 20, 1e-5)


def test_strided_inputs(device: torch.device) -> None:
    xs, gradient = inputs(19, 2, 2, 16, torch.float32, device)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in xs]
    strided = [x.requires_grad_() for x in strided]
    assert not strided[0].is_contiguous()
    out = flash_attention(*strided, True, SCALE)
    check(out, strided, gradient.transpose(1, 2).contiguous().transpose(1, 2), True, None, 1e-5)


def test_sequences_of_a_batch_do_not_mix(device: torch.device) -> None:
    xs, _ = inputs(21, 2, 1, 16, torch.float32, device)
    alone = flash_attention(*(x[:1] for x in xs), False, SCALE)
    with torch.no_grad():
        for x in xs:
            x[1] = torch.nan
    assert torch.equal(flash_attention(*xs, False, SCALE)[:1], alone)


def test_agrees_with_paged_prefill(device: torch.device) -> None:
    xs, _ = inputs(30, 4, 2, 16, torch.float64, torch.device("cpu"))
    q, k, v = (x.detach()[0] for x in xs)
    kv = torch.zeros(1, 2, 1, 2, 2, 16, 16, dtype=torch.float64)
    for token in range(30):
        kv[0, token // 16, 0, :, :, token % 16] = torch.stack((k[token], v[token]))
    paged = reference.prefill_attention(
        q,
        kv,
        0,
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.tensor([0, 30], dtype=torch.int32),
        torch.tensor([30], dtype=torch.int32),
        SCALE,
        7,
    )
    plain = reference_flash(q[None], k[None], v[None], True, SCALE, 7)[0]
    torch.testing.assert_close(paged, plain)


def test_nothing_to_do(device: torch.device) -> None:
    xs, gradient = inputs(0, 2, 1, 16, torch.float32, device)
    out = flash_attention(*xs, True, SCALE)
    out.backward(gradient)
    assert out.shape == gradient.shape
    assert [x.grad.shape for x in xs if x.grad is not None] == [x.shape for x in xs]


def test_refuses() -> None:
    q, k = torch.zeros(1, 5, 4, 16), torch.zeros(1, 5, 2, 16)
    for arguments, message in (
        ((q, k[:, :4], k[:, :4], True, 1.0), "does not fit"),
        ((q, k[:, :, :1].half(), k[:, :, :1].half(), True, 1.0), "float16"),
        ((q, k, k, False, 1.0, 4), "window"),
        ((q[..., :12], k[..., :12], k[..., :12], True, 1.0), "head_dim"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attention(*arguments)
