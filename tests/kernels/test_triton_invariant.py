"""Batch-invariant products and attention: right, and the same bits in any company."""

from collections.abc import Iterator

import memd_kernels as kernels
import numpy as np
import pytest
import torch
from memd_kernels import Sinks, launch, reference

pytest.importorskip("triton")

from memd_kernels.triton import invariant
from torch import Tensor

from .conftest import MakeKV
from .test_triton_prefill import LAYER, SCALE, make_batch, tolerance


@pytest.fixture(autouse=True)
def _rows_alike(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """A GPU's instructions compute all rows of a tile alike; numpy's library, which stands for them
    in the interpreter, does so only if it gets them one by one."""
    matmul = np.matmul

    def by_rows(a: np.ndarray, b: np.ndarray, **more: object) -> np.ndarray:
        return np.concatenate([matmul(a[row : row + 1], b, **more) for row in range(len(a))])

    if device.type == "cpu":
        monkeypatch.setattr(np, "matmul", by_rows)


@pytest.fixture
def _invariant() -> Iterator[None]:
    kernels.set_batch_invariant(True)
    yield
    kernels.set_batch_invariant(False)


@pytest.mark.parametrize(
    ("dtype", "depth", "biased"), [(torch.float16, 136, True), (torch.float32, 64, False)]
)
def test_product(device: torch.device, dtype: torch.dtype, depth: int, biased: bool) -> None:
    x = torch.randn(70, 2 * depth, device=device).to(dtype)[:, :depth]
    weight = torch.randn(72, depth, device=device).to(dtype)
    bias = torch.randn(72, device=device).to(dtype) if biased else None
    found = invariant.few_row_linear(x, weight, bias)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=2 * eps, atol=depth * 2.0**-22)
    for rows in (0, 1, 33):
        assert torch.equal(invariant.few_row_linear(x[:rows], weight, bias), found[:rows])
    # At another place among other rows.
    moved = invariant.few_row_linear(x.flip(0), weight, bias)
    assert torch.equal(moved.flip(0), found)


def test_wrong_products_are_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        invariant.few_row_linear(torch.zeros(2, 8), torch.zeros(4, 7))


@pytest.mark.parametrize(
    ("window", "sinks", "dtype"),
    [
        (None, 0, torch.float16),
        (None, 0, torch.float32),
        (25, 0, torch.float16),
        (20, 4, torch.float32),
    ],
)
def test_attention(
    make_kv: MakeKV, device: torch.device, window: int | None, sinks: int, dtype: torch.dtype
) -> None:
    """Of whole prompts, of chunks and of single tokens that decode: right, and the same bits."""
    kv = make_kv(20, 3, page_tokens=32, head_dim=16, dtype=dtype, device=device)
    lens = [75, 41]
    batch = make_batch(kv, lens, lens, group=3)
    turned = Sinks(sinks, torch.randn_like(batch.q)) if sinks else None
    whole = invariant.prefill_attention(*batch.arguments(window), turned)
    if not sinks:
        limit = tolerance(dtype)
        expected = batch.expected(window)
        torch.testing.assert_close(whole.double(), expected, rtol=limit, atol=limit)

    def part(sequence: int, start: int, stop: int) -> tuple[Tensor, Sinks | None, Tensor]:
        first = [0, lens[0]][sequence]
        rows = slice(first + start, first + stop)
        return batch.q[rows], None if turned is None else Sinks(sinks, turned.q[rows]), whole[rows]

    for sequence, length in enumerate(lens):
        table = batch.table[sequence : sequence + 1]
        for start, stop in ((0, 7), (7, 40), (40, length)):
            q, sink_q, expected = part(sequence, start, stop)
            starts = torch.tensor([0, stop - start], dtype=torch.int32, device=device)
            lengths = torch.tensor([stop], dtype=torch.int32, device=device)
            found = invariant.prefill_attention(
                q, kv, LAYER, table, starts, lengths, SCALE, window, sink_q
            )
            assert torch.equal(found, expected)
    for at in (0, 31, 40):  # both decode, at the same position
        parts = [part(sequence, at, at + 1) for sequence in range(2)]
        q = torch.cat([q for q, _, _ in parts])
        sink_q = Sinks(sinks, torch.cat([s.q for _, s, _ in parts if s])) if sinks else None
        lengths = torch.tensor([at + 1] * 2, dtype=torch.int32, device=device)
        plan = invariant.plan_decode(lengths, kv, 6, window, None, sinks)
        found = invariant.decode_attention(
            q, kv, LAYER, batch.table, lengths, SCALE, window, plan, sink_q
        )
        assert torch.equal(found, torch.cat([expected for _, _, expected in parts]))


def test_pages_that_a_window_has_passed_change_no_bit(
    make_kv: MakeKV, device: torch.device
) -> None:
    """They are taken out of the page table, and those behind them move up."""
    kv = make_kv(20, 3, page_tokens=16, head_dim=16, dtype=torch.float16, device=device)
    batch = make_batch(kv, [150], [3], group=2)
    kept = invariant.prefill_attention(*batch.arguments(40))
    batch.table = batch.table[:, 6:].contiguous()  # tokens below 96; the first query sees from 108
    batch.lens -= 6 * 16
    assert torch.equal(invariant.prefill_attention(*batch.arguments(40)), kept)


@pytest.mark.usefixtures("_invariant")
def test_launches_do_not_look_at_rows() -> None:
    hopper = (9, 0)
    found = {launch.config("rope_and_store", hopper, head_dim=64, rows=n) for n in (1, 64, 8192)}
    assert len(found) == 1
    kernels.set_batch_invariant(False)
    found = {launch.config("rope_and_store", hopper, head_dim=64, rows=n) for n in (1, 64, 8192)}
    assert len(found) > 1


@pytest.mark.usefixtures("_invariant")
def test_a_cpu_takes_the_functions_it_has(make_kv: MakeKV) -> None:
    """The second form is for CUDA tensors."""
    x, weight = torch.randn(3, 16), torch.randn(4, 16)
    torch.testing.assert_close(
        kernels.few_row_linear(x, weight), reference.few_row_linear(x, weight)
    )
