"""Weights in fewer bytes: every number is kept, and products are those of the wide weight."""

import gguf
import hypothesis.strategies as st
import memd_kernels as kernels
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from torch import Tensor

from .conftest import assert_product

FILES = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


def from_file(kind: Kind, count: int, size: int, seed: int = 0) -> Tensor:
    """A weight as a file of this encoding gives it."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((count, size)).astype(np.float32) * 0.1
    return torch.from_numpy(gguf.dequantize(gguf.quantize(values, kind), kind)).view(count, size)


def bfloat16(count: int, size: int) -> Tensor:
    return torch.randn(count, size).bfloat16().float()


def narrowed(weight: Tensor) -> kernels.NarrowWeight:
    narrow = kernels.narrow_weight(weight)
    assert narrow is not None
    return narrow


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("seed", range(3))
def test_every_number_of_a_quantised_file_is_kept(kind: Kind, seed: int) -> None:
    weight = from_file(kind, 64, 96, seed)
    narrow = narrowed(weight)
    assert narrow.codes.dtype == np.uint8
    assert torch.equal(narrow.wide(), weight)


@given(
    codes=st.lists(st.integers(0, 255), min_size=32, max_size=32),
    step=st.floats(2**-14, 16, width=16),
    low=st.integers(-300, 300),
)
@settings(deadline=None)
def test_any_codes_of_a_block(codes: list[int], step: float, low: int) -> None:
    row = torch.tensor(codes, dtype=torch.float32) * step + low * step
    weight = row.expand(8, 32).contiguous()
    assert torch.equal(narrowed(weight).wide(), weight)


@given(st.lists(st.floats(width=32), min_size=32, max_size=32))
@settings(deadline=None)
def test_nothing_is_changed_whatever_the_numbers(values: list[float]) -> None:
    weight = torch.tensor(values).expand(8, 32).contiguous()
    narrow = kernels.narrow_weight(weight)
    if narrow is not None:
        torch.testing.assert_close(narrow.wide(), weight, rtol=0, atol=0, equal_nan=True)


def test_bfloat16_is_kept_in_two_bytes() -> None:
    weight = bfloat16(24, 50)
    weight[3, 7], weight[4, 8], weight[5, 9] = torch.inf, -0.0, 1e-40
    weight = weight.bfloat16().float()
    narrow = narrowed(weight)
    assert narrow.codes.dtype == np.int16
    assert torch.equal(narrow.wide().view(torch.int32), weight.view(torch.int32))


def test_what_has_no_such_form_stays_wide() -> None:
    assert kernels.narrow_weight(torch.randn(16, 64)) is None
    quantised = from_file(Kind.Q4_1, 16, 64)
    assert kernels.narrow_weight(quantised[:12].contiguous()) is None  # not eight side by side
    assert kernels.narrow_weight(quantised[:, :40].contiguous()) is None  # not in blocks
    assert kernels.narrow_weight(quantised.bfloat16()) is None
    for number in (torch.nan, torch.inf, -torch.inf, float(quantised.max()) * 1.0001):
        other = quantised.clone()
        other[9, 33] = number
        assert kernels.narrow_weight(other) is None


def of_form(form: str, count: int) -> Tensor:
    if form == "codes":
        return from_file(Kind.Q4_1, count, 96)
    return bfloat16(count, 45)


FORMS = ["codes", "bfloat16"]


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 16, 24])
@pytest.mark.parametrize("count", [8, 24, 136])
@pytest.mark.parametrize("form", FORMS)
def test_products(rows: int, count: int, form: str) -> None:
    weight = of_form(form, count)
    narrow, bias = narrowed(weight), torch.randn(count)
    x = torch.randn(rows, 2 * weight.shape[1])[:, ::2]
    assert_product(kernels.narrow_linear(x, narrow), x, weight)
    assert_product(kernels.narrow_linear(x, narrow, bias), x, weight, bias)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_gets_the_same_alone(threads: int, form: str) -> None:
    weight = narrowed(of_form(form, 88))
    x = torch.randn(19, weight.codes.shape[1])
    expected = kernels.narrow_linear(x, weight)
    torch.set_num_threads(threads)
    assert torch.equal(kernels.narrow_linear(x, weight), expected)
    for row in range(len(x)):
        assert torch.equal(kernels.narrow_linear(x[row : row + 1], weight)[0], expected[row])


def test_nan_stays_in_its_row() -> None:
    weight = narrowed(from_file(Kind.Q8_0, 16, 32))
    x = torch.randn(3, 32)
    x[1, 4] = torch.nan
    out = kernels.narrow_linear(x, weight)
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()


def test_what_does_not_fit_is_refused() -> None:
    weight = narrowed(from_file(Kind.Q8_0, 16, 32))
    with pytest.raises(ValueError, match=r"weight is \(16, 32\) torch.float32, x \(2, 31\)"):
        kernels.narrow_linear(torch.zeros(2, 31), weight)
    with pytest.raises(ValueError, match="float64"):
        kernels.narrow_linear(torch.zeros(2, 32).double(), weight)
    with pytest.raises(ValueError, match=r"bias is \(15,\)"):
        kernels.narrow_linear(torch.zeros(2, 32), weight, torch.zeros(15))
