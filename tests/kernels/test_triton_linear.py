"""The few-row product in Triton against float64, with and without splits of K."""

import pytest
import torch
from memd_kernels.launch import LaunchConfig

pytest.importorskip("triton")

from memd_kernels.triton.linear import few_row_linear, launch_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "size", "depth"), [(1, 32, 64), (5, 40, 72), (17, 24, 40)])
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_product(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    size: int,
    depth: int,
    splits: int,
    biased: bool,
) -> None:
    x = torch.randn(rows, 2 * depth, device=device).to(dtype)[:, :depth]
    weight = torch.randn(size, depth, device=device).to(dtype)
    bias = torch.randn(size, device=device).to(dtype) if biased else None
    launch = LaunchConfig(block_n=16, block_k=16, splits=splits)
    found = launch_linear(x, weight, bias, launch)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=2 * eps, atol=64 * 2.0**-23)
    # The counters are left as they were found, and the order of the sums is fixed.
    assert torch.equal(found, launch_linear(x, weight, bias, launch))


@pytest.mark.parametrize("rows", [0, 1, 64, 65])
def test_launcher(device: torch.device, rows: int) -> None:
    x, weight = torch.randn(rows, 48, device=device), torch.randn(80, 48, device=device)
    found = few_row_linear(x, weight)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().t(), rtol=0, atol=1e-5)


def test_wrong_arguments_are_refused() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="weight"):
        few_row_linear(x, weight[:, :4])
    with pytest.raises(ValueError, match="weight"):
        few_row_linear(x.half(), weight)
    with pytest.raises(ValueError, match="bias"):
        few_row_linear(x, weight, torch.zeros(3))
