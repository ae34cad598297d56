"""Writes into pages, and copies between them."""

import pytest
import torch
from memd_kernels.reference import move_pages, rms_norm, rope_and_store
from torch import Tensor

from .conftest import MakeKV


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair as a complex number times that of its angle."""
    half = cos.shape[1]
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    turned = pairs * torch.complex(cos, sin)[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


@pytest.mark.parametrize("waste", [0, 7, 130])
@pytest.mark.parametrize("half", [2, 4])
def test_rope_and_store(make_kv: MakeKV, waste: int, half: int) -> None:
    kv = make_kv(waste=waste)
    rows = 9
    qkv = torch.randn(rows, 8, 8)
    q, k, v = qkv.split((4, 2, 2), 1)
    angles = torch.rand(rows, half) * 6
    cos, sin = angles.cos(), angles.sin()
    pages = torch.tensor([14, 14, 0, 3, 3, 3, 7, 11, 12])
    offsets = torch.tensor([0, 1, 3, 0, 2, 1, 3, 3, 0])
    given = qkv.clone()
    rotated = rope_and_store(q, k, v, cos, sin, kv, 1, pages, offsets)
    torch.testing.assert_close(rotated, rotate(q, cos, sin))
    assert torch.equal(qkv, given)
    expected = torch.full_like(kv, torch.nan)
    for row, (page, offset) in enumerate(zip(pages.tolist(), offsets.tolist(), strict=True)):
        expected[page // 3, page % 3, 1, 0, :, offset] = rotate(k, cos, sin)[row]
        expected[page // 3, page % 3, 1, 1, :, offset] = v[row]
    torch.testing.assert_close(kv, expected, equal_nan=True)


def test_rotation_of_half_precision_is_rounded_once(make_kv: MakeKV) -> None:
    kv = make_kv(dtype=torch.bfloat16)
    q, k, v = torch.randn(1, 8, 8).bfloat16().split((4, 2, 2), 1)
    cos, sin = torch.tensor([[0.1, 0.5, 0.7, 0.99]]), torch.tensor([[0.9, 0.8, 0.7, 0.01]])
    index = torch.zeros(1, dtype=torch.int64)
    rotated = rope_and_store(q, k, v, cos, sin, kv, 0, index, index)
    torch.testing.assert_close(rotated, rotate(q.float(), cos, sin).bfloat16(), rtol=0, atol=0)
    assert torch.equal(kv[0, 0, 0, 1, :, 0], v[0])


def test_wrong_rows_are_refused(make_kv: MakeKV) -> None:
    kv = make_kv()
    q, k, v = torch.randn(3, 8, 8).split((4, 2, 2), 1)
    cos, index = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)

    def store(**changes: Tensor) -> None:
        arguments = {"q": q, "k": k, "v": v, "cos": cos, "sin": cos, "kv": kv}
        arguments |= {"write_pages": index, "write_offsets": index, **changes}
        rope_and_store(layer=0, **arguments)

    for field, value in (
        ("k", k[:2]),
        ("v", v[:, :1]),
        ("v", v.double()),
        ("cos", cos[:2]),
        ("sin", cos[:, :2]),
        ("write_pages", index[:2]),
        ("write_offsets", index.float()),
        ("q_norm", q[0, 0]),
    ):
        with pytest.raises(ValueError, match=field):
            store(**{field: value})
    with pytest.raises(ValueError, match="cos"):
        store(cos=torch.ones(3, 5), sin=torch.ones(3, 5))
    assert kv.isnan().all()


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_rows_without_a_page_are_not_written(make_kv: MakeKV) -> None:
    kv = make_kv()
    q, k, v = torch.randn(3, 8, 8).split((4, 2, 2), 1)
    cos, sin = torch.rand(2, 3, 4)
    pages = torch.tensor([-1, 4, -1])
    rotated = rope_and_store(q, k, v, cos, sin, kv, 0, pages, torch.tensor([0, 2, 1]))
    torch.testing.assert_close(rotated, rotate(q, cos, sin))
    assert torch.equal(kv[1, 1, 0, 1, :, 2], v[1])
    assert (~kv.isnan()).sum() == 2 * v[1].numel()


def test_heads_are_normed_before_they_turn(make_kv: MakeKV) -> None:
    q, k, v = torch.randn(3, 8, 8).split((4, 2, 2), 1)
    cos, sin = torch.rand(2, 3, 4)
    q_norm, k_norm = torch.randn(2, 8)
    pages, offsets = torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.int64)
    kv, expected_kv = make_kv(), make_kv()
    rotated = rope_and_store(q, k, v, cos, sin, kv, 0, pages, offsets, q_norm, k_norm, 1e-5)
    normed = rms_norm(q, q_norm, 1e-5)[0], rms_norm(k, k_norm, 1e-5)[0]
    expected = rope_and_store(*normed, v, cos, sin, expected_kv, 0, pages, offsets)
    assert torch.equal(rotated, expected)
    torch.testing.assert_close(kv, expected_kv, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("waste", [0, 7])
def test_move_pages(make_kv: MakeKV, waste: int) -> None:
    kv = make_kv(waste=waste)
    kv.copy_(torch.randn(kv.shape))
    pages = kv.flatten(0, 1).clone()
    move_pages(kv, integers(13, 2, 4, -1), integers(0, 5, 6, 9), integers(3, 4, 0, 4))
    pages[0, :, :, :, :3] = pages[13, :, :, :, :3]
    pages[5] = pages[2]
    assert torch.equal(kv.flatten(0, 1), pages)
    move_pages(kv, integers(13, -1), integers(1, 2))
    pages[1] = pages[13]
    assert torch.equal(kv.flatten(0, 1), pages)


def test_wrong_moves_are_refused_whole(make_kv: MakeKV) -> None:
    kv = make_kv()
    kv.copy_(torch.randn(kv.shape))
    before = kv.clone()
    for sources, targets, counts in (
        ((1, 15), (2, 3), (1, 1)),
        ((1, 3), (2, -1), (1, 1)),
        ((1, 3), (2, 4), (1, 5)),
        ((1, 3), (2,), (1, 1)),
        ((1, 3), (2, 2), (1, 1)),
        ((1, 2), (2, 4), (1, 1)),
    ):
        with pytest.raises(ValueError, match=r"page|count|targets"):
            move_pages(kv, integers(*sources), integers(*targets), integers(*counts))
    with pytest.raises(ValueError, match="sources"):
        move_pages(kv, torch.tensor([1]), integers(2))
    assert torch.equal(kv, before)
