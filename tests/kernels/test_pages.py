"""Writes into pages, and copies between them."""

import pytest
import torch
from memd_kernels.reference import copy_page_tokens, rope_and_store
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
        ("write_offsets", index.int()),
    ):
        with pytest.raises(ValueError, match=field):
            store(**{field: value})
    with pytest.raises(ValueError, match="cos"):
        store(cos=torch.ones(3, 5), sin=torch.ones(3, 5))
    assert kv.isnan().all()


@pytest.mark.parametrize("waste", [0, 7])
def test_copy_page_tokens(make_kv: MakeKV, waste: int) -> None:
    kv = make_kv(waste=waste)
    kv.copy_(torch.randn(kv.shape))
    pages = kv.flatten(0, 1).clone()
    copy_page_tokens(kv, [13, 2, 4], [0, 5, 6], [3, 4, 0])
    pages[0, :, :, :, :3] = pages[13, :, :, :, :3]
    pages[5] = pages[2]
    assert torch.equal(kv.flatten(0, 1), pages)


def test_wrong_copies_are_refused_whole(make_kv: MakeKV) -> None:
    kv = make_kv()
    kv.copy_(torch.randn(kv.shape))
    before = kv.clone()
    for sources, targets, counts in (
        ([1, 15], [2, 3], [1, 1]),
        ([1, 3], [2, -1], [1, 1]),
        ([1, 3], [2, 4], [1, 5]),
        ([1, 3], [2], [1, 1]),
    ):
        with pytest.raises(ValueError, match=r"page|argument"):
            copy_page_tokens(kv, sources, targets, counts)
    assert torch.equal(kv, before)
