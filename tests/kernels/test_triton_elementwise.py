"""Norms, activation, rope and page moves in Triton against the reference."""

import pytest
import torch
from memd_kernels import reference
from torch import Tensor

from .conftest import MakeKV

pytest.importorskip("triton")

from memd_kernels.triton.norm import rms_norm, silu_mul
from memd_kernels.triton.pages import move_pages
from memd_kernels.triton.rope import rope_and_store

# The interpreter cuts float32 to bfloat16 where a GPU rounds.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def close(found: Tensor, expected: Tensor) -> None:
    """Equal but for one rounding of the dtype at the largest value: sums may cancel."""
    eps = torch.finfo(found.dtype).eps
    largest = max(expected.nan_to_num().abs().flatten().tolist(), default=0.0)
    torch.testing.assert_close(
        found, expected, rtol=4 * eps, atol=eps * max(largest, 1.0), equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 40), (2, 3, 64), (0, 64)])
def test_rms_norm(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = torch.randn(2, *shape, device=device).to(dtype)
    weight = torch.randn(shape[-1], device=device).to(dtype)
    for added in (None, residual):
        normed, total = rms_norm(x, weight, 1e-5, added)
        expected, expected_total = reference.rms_norm(x, weight, 1e-5, added)
        close(normed, expected)
        assert torch.equal(total, expected_total)


def test_rms_norm_of_rows_that_are_not_dense(device: torch.device) -> None:
    x = torch.randn(3, 5, 32, device=device)[:, 1:4]
    weight = torch.randn(32, device=device)
    close(rms_norm(x, weight, 1e-6)[0], reference.rms_norm(x, weight, 1e-6)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_silu_mul(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    gate_up = (torch.randn(rows, 2 * 1100, device=device) * 20).to(dtype)
    close(silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "half"), [(8, 4), (24, 12), (40, 8)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_store(
    make_kv: MakeKV,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    half: int,
    index: torch.dtype,
    normed: bool,
) -> None:
    rows, heads, kv_heads = 5, 6, 3
    qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    angles = torch.rand(rows, half, device=device) * 6
    pages = torch.tensor([14, -1, 0, 3, 3], dtype=index, device=device)
    offsets = torch.tensor([0, 1, 3, 0, 2], dtype=index, device=device)
    norms = torch.randn(2, head_dim, device=device).to(dtype).unbind() if normed else (None, None)
    results = []
    for function in (rope_and_store, reference.rope_and_store):
        kv = make_kv(waste=7, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)
        given = qkv.clone()
        rotated = function(
            q, k, v, angles.cos(), angles.sin(), kv, 1, pages, offsets, *norms, eps=1e-6
        )
        assert torch.equal(qkv, given)
        results.append((rotated, kv))
    (rotated, kv), (expected, expected_kv) = results
    close(rotated, expected)
    close(kv, expected_kv)


@pytest.mark.parametrize("waste", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_move_pages(make_kv: MakeKV, device: torch.device, waste: int, dtype: torch.dtype) -> None:
    moves = torch.tensor(
        [[13, 2, 4, -1, 7], [0, 5, 6, 1, 8], [3, 4, 0, 4, 1]], dtype=torch.int32, device=device
    )
    for counts in (None, moves[2]):
        for layout in (moves, moves.t().contiguous().t()):  # dense columns, or a table of moves
            memory = make_kv(waste=waste, head_dim=24, dtype=dtype, device=device)
            memory.copy_(torch.randn(memory.shape))
            expected = memory.clone()
            reference.move_pages(expected, moves[0], moves[1], counts)
            move_pages(memory, layout[0], layout[1], None if counts is None else layout[2])
            assert torch.equal(memory, expected)
