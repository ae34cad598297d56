"""The compiled CPU kernels against plain torch, over NaN-filled memory and shuffled pages.

For bfloat16 plain torch computes in float32 from the same numbers: one rounding is all that is
allowed between them.
"""

import subprocess
import sys

import pytest
import torch
from memd_kernels import cpu, reference
from torch import Tensor

from .conftest import MakeKV, assert_product

LAYER = 1
ROWS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16, 17, 40]
DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = 2.0**-7  # one step of bfloat16, at most


def close(actual: Tensor, expected: Tensor) -> None:
    error = 1e-5 if actual.dtype == torch.float32 else ROUNDING
    torch.testing.assert_close(actual.float(), expected.float(), rtol=error, atol=1e-5)


def sequences(kv: Tensor, lens: list[int]) -> tuple[Tensor, Tensor]:
    """Written pages in random order; what the table has past a sequence's pages are no pages.

    Returns:
        page_table, kv_lens.
    """
    generator = torch.Generator().manual_seed(sum(lens))
    page_tokens = kv.shape[5]
    counts = [-(-length // page_tokens) for length in lens]
    free = torch.randperm(kv.shape[0] * kv.shape[1], generator=generator).tolist()
    table = torch.full((len(lens), max(counts) + 1), -7, dtype=torch.int32)
    for row, length in enumerate(lens):
        for index in range(counts[row]):
            table[row, index] = page = free.pop()
            used = min(page_tokens, length - index * page_tokens)
            place = kv[page // kv.shape[1], page % kv.shape[1], LAYER, :, :, :used]
            place.copy_(torch.randn(place.shape, generator=generator))
    return table, torch.tensor(lens, dtype=torch.int32)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("size", "columns"), [(1, 1), (20, 7), (64, 33), (64, 40), (200, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(rows: int, size: int, columns: int, dtype: torch.dtype) -> None:
    bias = torch.randn(columns).to(dtype)
    for x in (torch.randn(rows, size).to(dtype), torch.randn(rows, 2 * size).to(dtype)[:, ::2]):
        for wide in (torch.randn(columns, size), torch.randn(columns, size + 3)[:, :size]):
            weight = wide.to(dtype)
            assert_product(cpu.few_row_linear(x, weight), x, weight)
            assert_product(cpu.few_row_linear(x, weight, bias), x, weight, bias)


GROWTH = """
import resource
import torch
from memd_kernels import cpu

def peak_bytes():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

weights = torch.randn(960, 576), torch.randn(576, 960)
for rows in (17, 400, *range(18, 400)):
    for weight in weights:
        cpu.few_row_linear(torch.randn(rows, weight.shape[1]), weight)
    if rows == 400:
        before = peak_bytes()
print(peak_bytes() - before)
"""


def test_memory_does_not_grow_with_the_numbers_of_rows_seen() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 100e6


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_gets_the_same_alone(dtype: torch.dtype) -> None:
    x, weight = torch.randn(13, 72).to(dtype), torch.randn(40, 72).to(dtype)
    together = cpu.few_row_linear(x, weight)
    for row in range(len(x)):
        assert torch.equal(cpu.few_row_linear(x[row : row + 1], weight)[0], together[row])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads: int, make_kv: MakeKV) -> None:
    x, weight = torch.randn(5, 48), torch.randn(32, 48)
    kv = make_kv(num_blocks=60, page_tokens=16)
    table, lens = sequences(kv, [700, 3, 0, 256, 257])
    q = torch.randn(5, 6, 8)
    expected = (
        cpu.few_row_linear(x, weight),
        cpu.decode_attention(q, kv, LAYER, table, lens, 0.3, None),
    )
    torch.set_num_threads(threads)
    assert torch.equal(cpu.few_row_linear(x, weight), expected[0])
    assert torch.equal(cpu.decode_attention(q, kv, LAYER, table, lens, 0.3, None), expected[1])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(rows: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(rows, 40).mul(9).to(dtype), torch.randn(rows, 40).to(dtype)
    weight = torch.randn(20).to(dtype)
    for value in (x[:, :20], x[:, ::2]):
        for added in (None, residual[:, 20:]):
            before = value.clone()
            out, total = cpu.rms_norm(value, weight, 1e-5, added)
            summed = value if added is None else value + added
            assert torch.equal(total, summed)
            close(out, reference.rms_norm(summed.float(), weight.float(), 1e-5)[0])
            assert torch.equal(value, before)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [1, 8, 20, 48])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu(rows: int, size: int, dtype: torch.dtype) -> None:
    wide = torch.randn(rows, 4 * size).mul(20).to(dtype)
    for gate_up in (wide[:, : 2 * size], wide[:, ::2]):
        if size % 8:
            assert torch.equal(cpu.silu_mul(gate_up), reference.silu_mul(gate_up))
        else:
            close(cpu.silu_mul(gate_up), reference.silu_mul(gate_up.float()))


def test_silu_of_any_number() -> None:
    gates = torch.tensor([0.0, -0.0, 1e-40, 88, -88, 104, -104, 1e30, -1e30, torch.inf, torch.nan])
    gate_up = torch.stack([gates.repeat(8), torch.full((88,), 2.0)]).flatten()[None]
    close_enough = {"rtol": 1e-5, "atol": 1e-30, "equal_nan": True}
    torch.testing.assert_close(cpu.silu_mul(gate_up), reference.silu_mul(gate_up), **close_enough)


@pytest.mark.parametrize("rows", [0, 1, 5, 17])
@pytest.mark.parametrize("rope_dim", [8, 6])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("waste", [0, 7])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(
    make_kv: MakeKV,
    rows: int,
    rope_dim: int,
    normed: bool,
    waste: int,
    by_columns: bool,
    dtype: torch.dtype,
) -> None:
    heads = torch.randn(rows, 64).to(dtype)
    if by_columns:
        heads = heads.t().contiguous().t()
    heads = heads.unflatten(1, (8, 8))
    q, k, v = heads.split((4, 2, 2), 1)
    cos, sin = torch.randn(2, rows, rope_dim // 2)
    weights = torch.randn(2, 8).to(dtype) if normed else (None, None)
    places = torch.randperm(60)[:rows]
    pages, offsets = places // 4, (places % 4).int()
    pages[1:2] = -1
    kv, wide = make_kv(waste=waste, dtype=dtype), make_kv(waste=waste)
    places = (pages, offsets)
    out = cpu.rope_and_store(q, k, v, cos, sin, kv, LAYER, *places, *weights, 1e-5)
    q, k, v = heads.float().split((4, 2, 2), 1)
    weights = tuple(None if weight is None else weight.float() for weight in weights)
    expected = reference.rope_and_store(q, k, v, cos, sin, wide, LAYER, *places, *weights, 1e-5)
    close(out, expected)
    close(kv.nan_to_num(7.0), wide.nan_to_num(7.0))


@pytest.mark.parametrize("window", [None, 1, 7, 300])
@pytest.mark.parametrize("waste", [0, 7])
@pytest.mark.parametrize(
    ("heads", "page_tokens", "size"), [(2, 16, 8), (6, 5, 64), (16, 48, 80), (4, 16, 12)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode(
    make_kv: MakeKV,
    window: int | None,
    waste: int,
    heads: int,
    page_tokens: int,
    size: int,
    dtype: torch.dtype,
) -> None:
    lens = [1, 256, 0, 530, 11]
    kv = make_kv(num_blocks=60, page_tokens=page_tokens, waste=waste, head_dim=size, dtype=dtype)
    table, kv_lens = sequences(kv, lens)
    q = torch.randn(heads, len(lens), size).to(dtype).transpose(0, 1)
    plan = cpu.plan_decode(kv_lens, kv, heads, window)
    out = cpu.decode_attention(q, kv, LAYER, table, kv_lens, 0.3, window, plan)
    expected = reference.decode_attention(
        q.float(), kv.float(), LAYER, table.clamp_min(0), kv_lens, 0.3, window
    )
    if size % 8 == 0:
        close(out, expected)
    else:  # plain torch, which rounds what is between
        torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    assert not out[2].any()
    given = torch.full(out.shape, torch.nan, dtype=dtype)
    cpu.decode_attention(q, kv, LAYER, table, kv_lens, 0.3, window, plan, out=given)
    assert torch.equal(given, out)
    for row in range(len(lens)):  # depends on nothing else in the batch
        own = slice(row, row + 1)
        alone = cpu.decode_attention(q[own], kv, LAYER, table[own], kv_lens[own], 0.3, window)
        assert torch.equal(alone, out[own])
    groups = torch.zeros(3, 3, dtype=torch.int32)
    shared = cpu.shared_prefix_attention(q, kv, LAYER, table, kv_lens, groups, 0.3, window)
    assert torch.equal(shared, out)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, 3e4])
def test_scores_of_any_size(make_kv: MakeKV, scale: float) -> None:
    kv = make_kv(num_blocks=20)
    table, lens = sequences(kv, [90, 3])
    q = torch.randn(2, 4, 8)
    out = cpu.decode_attention(q, kv, LAYER, table, lens, scale, None)
    expected = reference.decode_attention(
        q.double(), kv.double(), LAYER, table.clamp_min(0), lens, scale, None
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-4)


def test_nan_stays_in_its_row(make_kv: MakeKV) -> None:
    kv = make_kv(num_blocks=20)
    table, lens = sequences(kv, [30, 30])
    q = torch.randn(2, 4, 8)
    q[0] = torch.nan
    out = cpu.decode_attention(q, kv, LAYER, table, lens, 0.3, None)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_what_does_not_exist_is_refused(make_kv: MakeKV) -> None:
    kv = make_kv()  # 15 pages of 4 tokens
    q, lens = torch.zeros(1, 4, 8), torch.tensor([5], dtype=torch.int32)
    for page in (-1, 15, 2**31 - 1):
        table = torch.tensor([[0, page]], dtype=torch.int32)
        with pytest.raises(ValueError, match="one of the 15 of kv"):
            cpu.decode_attention(q, kv, 0, table, lens, 1.0, None)
    with pytest.raises(ValueError, match="page_table holds 2"):
        cpu.decode_attention(q, kv, 0, table, lens + 4, 1.0, None)
    plan = cpu.plan_decode(lens.repeat(3), kv, 4, None)
    with pytest.raises(ValueError, match="plan 3 for 1 rows"):
        cpu.decode_attention(q, kv, 0, table, lens, 1.0, None, plan)
    k, angles = torch.zeros(1, 2, 8), torch.zeros(1, 4)
    before = kv.clone()
    for page, offset in ((15, 0), (-2, 0), (0, 4), (0, -1)):
        with pytest.raises(ValueError, match="not in kv"):
            cpu.rope_and_store(
                q, k, k, angles, angles, kv, 0, torch.tensor([page]), torch.tensor([offset])
            )
    torch.testing.assert_close(kv, before, equal_nan=True)
