"""Norm and activation against their formulas in float64."""

import pytest
import torch
from memd_kernels.reference import rms_norm, silu_mul


@pytest.mark.parametrize("shape", [(1, 6), (5, 6), (4, 3, 6), (0, 6)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(6)
    for added in (None, residual):
        normed, total = rms_norm(x, weight, 1e-5, added)
        wide = (x if added is None else x + residual).double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(total.double(), wide, rtol=1e-6, atol=1e-6)


def test_rms_norm_rounds_where_llama_does() -> None:
    x, weight = torch.randn(7, 64).bfloat16() * 50, torch.randn(64).bfloat16()
    wide = x.float()
    normal = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
    normed, _ = rms_norm(x, weight, 1e-5)
    assert torch.equal(normed, weight * normal)


def test_silu_mul() -> None:
    gate_up = torch.randn(5, 12)
    given = gate_up.clone()
    gate, up = gate_up.double().split(6, 1)
    torch.testing.assert_close(
        silu_mul(gate_up).double(), gate * gate.sigmoid() * up, rtol=1e-5, atol=1e-6
    )
    assert torch.equal(gate_up, given)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        rms_norm(torch.zeros(2, 6), torch.zeros(5), 1e-5)
    with pytest.raises(ValueError, match="float64"):
        rms_norm(torch.zeros(2, 6), torch.zeros(6).double(), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        rms_norm(torch.zeros(2, 6), torch.zeros(6), 1e-5, torch.zeros(1, 6))
    with pytest.raises(ValueError, match="gate_up has 5"):
        silu_mul(torch.zeros(2, 5))
