"""Packed pages in plain torch: what is lost, and attention over pages of both formats."""

from itertools import product

import pytest
import torch
from memd_kernels.formats import FORMAT_NAMES, PACKED_PAGE, FormatName, PackedFormat, PackedPages
from memd_kernels.reference import (
    decode_attention,
    move_packed_pages,
    pack_pages,
    plan_decode,
    prefill_attention,
    shared_prefix_attention,
    unpack_pages,
)
from memd_kernels.reference.packed import scale_byte, scale_of
from torch import Tensor

from .conftest import MakeKV
from .packed_case import PackedCase, make_packed, make_packed_case
from .test_attention import LAYER, SCALE, int32, naive

# Of normal numbers; int4 has 15 steps over about 4 standard deviations.
MOST_ERROR = {"int8": 0.01, "int4": 0.11, "fp8": 0.03}


def random_kv(page_tokens: int = 64, head_dim: int = 64, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(page_tokens + head_dim)
    return torch.randn(2, 2, 2, 2, 3, page_tokens, head_dim, generator=generator) * scale


def relative(read: Tensor, true: Tensor) -> float:
    return float((read.double() - true.double()).norm() / true.double().norm())


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize(("page_tokens", "head_dim"), [(16, 8), (16, 80), (64, 64), (128, 256)])
def test_pages_come_back_nearly_as_they_were(
    name: FormatName, page_tokens: int, head_dim: int
) -> None:
    kv = random_kv(page_tokens, head_dim)
    packed = make_packed(kv, name)
    before = packed.memory.clone()
    errors = pack_pages(kv, packed, int32(1, -1, 3), int32(2, 0, 5))
    back = torch.full_like(kv, torch.nan)
    unpack_pages(packed, back, int32(2, -1, 5), int32(0, 1, 2))
    assert back[0, 1].isnan().all()
    assert back[1, 1].isnan().all()
    assert errors.shape == (3, 2, 3, 2)
    for layer, side, head in product(range(2), range(2), range(3)):
        lost = relative(back[0, 0, layer, side, head], kv[0, 1, layer, side, head])
        assert errors[0, layer, head, side].item() == pytest.approx(lost, rel=1e-4)
    assert not errors[1].any()
    assert 0 < errors.max() < MOST_ERROR[name]
    assert relative(back[1, 0], kv[1, 1]) <= errors[2].max()
    untouched = [0, 1, 3, 4]
    assert torch.equal(packed.memory.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])


@pytest.mark.parametrize("magnitude", [1e-3, 0.04, 1.0, 40.0, 2000.0])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_error_does_not_depend_on_magnitude(name: FormatName, magnitude: float) -> None:
    kv = random_kv(scale=magnitude)
    errors = pack_pages(kv, make_packed(kv, name), int32(0), int32(0))
    assert errors.max() < 1.3 * MOST_ERROR[name]


def test_channels_far_from_zero_and_outliers_keep_their_error() -> None:
    kv = random_kv(head_dim=64)
    kv[:, :, :, 0, :, :, 7] *= 100
    kv[:, :, :, 0, :, :, 11] += 50
    packed = make_packed(kv, "int8")
    pack_pages(kv, packed, int32(0), int32(0))
    back = torch.empty_like(kv)
    unpack_pages(packed, back, int32(0), int32(0))
    for channel in range(64):
        lost = back[0, 0, :, 0, ..., channel] - kv[0, 0, :, 0, ..., channel]
        spread = kv[0, 0, :, 0, ..., channel].std()
        assert lost.square().mean().sqrt() < 0.02 * spread, channel


def test_equal_numbers_are_kept() -> None:
    kv = torch.zeros(1, 1, 1, 2, 1, 16, 8)
    kv[..., 0] = 3.5
    for name in FORMAT_NAMES:
        packed = make_packed(kv, name)
        errors = pack_pages(kv, packed, int32(0), int32(0))
        back = torch.full_like(kv, torch.nan)
        unpack_pages(packed, back, int32(0), int32(0))
        assert torch.equal(back[:, :, :, 0], kv[:, :, :, 0]), name  # keys: a channel is constant
        assert torch.isfinite(back).all()
        assert errors.max() < 0.05
        assert not pack_pages(torch.zeros_like(kv), packed, int32(0), int32(0)).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_what_is_no_number_is_reported(name: FormatName, bad: float) -> None:
    kv = random_kv(16, 8)
    kv[0, 1, 1, 1, 2, 5, 3] = bad
    errors = pack_pages(kv, make_packed(kv, name), int32(0, 1), int32(0, 1))
    assert (errors == torch.inf).nonzero().tolist() == [[1, 1, 2, 1]]
    assert errors[0].max() < 1.3 * MOST_ERROR[name]


def test_equal_pages_are_equal_bytes() -> None:
    kv = random_kv(16, 80)
    kv[1, 0] = kv[0, 0]
    for name in FORMAT_NAMES:
        packed = make_packed(kv, name)
        pack_pages(kv, packed, int32(0, 2), int32(4, 1))
        first, second = packed.memory.flatten(0, 1)[[4, 1]]
        assert torch.equal(first, second)


def test_scales_cover_what_they_stand_for() -> None:
    scales = torch.logspace(-4, 2.9, 400)
    stored = scale_of(scale_byte(scales, 64))
    assert (stored > scales * (1 - 2**-10)).all()
    assert (stored < scales * 1.126).all()
    for base in (64, 1024):
        ends = scale_of(scale_byte(torch.tensor([0.0, 1e9, torch.inf]), base))
        assert ends.tolist() == [0, 61440 / base, 61440 / base]


def test_moved_pages_are_the_same_bits() -> None:
    kv = random_kv(16, 8)
    packed = make_packed(kv, "int4")
    packed.memory.random_(0, 256)
    pages = packed.memory.flatten(0, 1).clone()
    move_packed_pages(packed, int32(0, -1, 5), int32(3, 1, 2))
    pages[3], pages[2] = pages[0].clone(), pages[5].clone()
    assert torch.equal(packed.memory.flatten(0, 1), pages)
    count = packed.num_pages
    for sources, targets in (((0,), (count,)), ((-2,), (1,)), ((0, 1), (2, 2)), ((0, 1), (1, 2))):
        with pytest.raises(ValueError, match="page"):
            move_packed_pages(packed, int32(*sources), int32(*targets))
    with pytest.raises(ValueError, match="targets"):
        move_packed_pages(packed, int32(0), int32(1, 2))
    assert torch.equal(packed.memory.flatten(0, 1), pages)


def check(out: Tensor, case: PackedCase, window: int | None, bound: float = 1e-5) -> None:
    for row, content in enumerate(case.contents):
        if not content.shape[2]:
            assert not out[row].any()
            continue
        expected = naive(case.q[row : row + 1], content, window)
        torch.testing.assert_close(out[row : row + 1].double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("window", [None, 21, 70])
@pytest.mark.parametrize("order", ["middle", "shuffled", "all"])
def test_attention_over_both_formats(
    make_kv: MakeKV, name: FormatName, window: int | None, order: str
) -> None:
    lens = [1, 150, 16, 0, 97]
    case = make_packed_case(make_kv, name, lens, order=order)
    kv_lens = int32(*lens)
    arguments = (case.q, case.kv, LAYER, case.table, kv_lens)
    out = decode_attention(*arguments, SCALE, window, packed=case.packed)
    check(out, case, window)
    plan = plan_decode(kv_lens, case.kv, 4, window, None, 0, case.table, case.packed)
    assert torch.equal(decode_attention(*arguments, SCALE, window, plan, packed=case.packed), out)
    groups = torch.zeros(1, 3, dtype=torch.int32)
    shared = shared_prefix_attention(
        *arguments, groups, SCALE, window, plan=plan, packed=case.packed
    )
    assert torch.equal(shared, out)
    starts = int32(0, 1, 2, 3, 4, 5)
    prefilled = prefill_attention(
        case.q, case.kv, LAYER, case.table, starts, kv_lens, SCALE, window, packed=case.packed
    )
    check(prefilled, case, window)


def test_prefill_over_packed_pages(make_kv: MakeKV) -> None:
    case = make_packed_case(make_kv, "int4", [150], rows=70)
    out = prefill_attention(
        case.q,
        case.kv,
        LAYER,
        case.table,
        int32(0, 70),
        int32(150),
        SCALE,
        None,
        packed=case.packed,
    )
    expected = naive(case.q, case.contents[0], None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("magnitude", [0.04, 1.0, 40.0])
def test_c061_scales_follow_the_magnitude(magnitude: float) -> None:
    """Attention over int8 keys and values is right to 2 % whatever their size; int4 to 25 %."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(1, 4, 1, 2, 1, 64, 128, generator=generator) * magnitude
    q = torch.randn(32, 1, 128, generator=generator)
    table, lens = int32(0, 1, 2, 3).expand(32, 4).contiguous(), int32(*[256] * 32)
    true = decode_attention(q, kv, 0, table, lens, 128**-0.5, None)
    for name, most in (("int8", 0.02), ("fp8", 0.12), ("int4", 0.25)):
        packed = make_packed(kv, name)
        pack_pages(kv, packed, int32(0, 1, 2, 3), int32(3, 2, 1, 0))
        out = decode_attention(
            q, kv, 0, PACKED_PAGE + 3 - table, lens, 128**-0.5, None, packed=packed
        )
        error = (out - true).norm(dim=-1) / true.norm(dim=-1)
        assert error.median() < most, (name, error.median())
        assert torch.isfinite(out).all()


def test_c063_a_row_is_the_same_from_decoding_and_from_prefill(make_kv: MakeKV) -> None:
    """Cold and warm: which call computes a token over packed pages changes rounding only."""
    case = make_packed_case(make_kv, "int8", [120, 75])
    lens = int32(120, 75)
    decoded = decode_attention(
        case.q, case.kv, LAYER, case.table, lens, SCALE, None, packed=case.packed
    )
    prefilled = prefill_attention(
        case.q, case.kv, LAYER, case.table, int32(0, 1, 2), lens, SCALE, None, packed=case.packed
    )
    torch.testing.assert_close(decoded, prefilled, rtol=1e-6, atol=1e-6)


def test_c066_pages_that_are_not_there_are_refused(make_kv: MakeKV) -> None:
    case = make_packed_case(make_kv, "int8", [40])
    pages, packed_pages = case.kv.shape[0] * case.kv.shape[1], case.packed.num_pages
    good = case.table.clone()

    def attend(table: Tensor, lens: Tensor, packed: PackedPages | None) -> Tensor:
        prefill_attention(
            case.q, case.kv, LAYER, table, int32(0, 1), lens, SCALE, None, packed=packed
        )
        return decode_attention(case.q, case.kv, LAYER, table, lens, SCALE, None, packed=packed)

    for entry in (-1, pages, PACKED_PAGE - 1, PACKED_PAGE + packed_pages, 2**31 - 1):
        table = good.clone()
        table[0, 1] = entry
        with pytest.raises(ValueError, match="page_table names"):
            attend(table, int32(40), case.packed)
    table = good.clone()
    table[0, 1] = PACKED_PAGE
    with pytest.raises(ValueError, match="page_table names"):
        attend(table, int32(40), None)
    with pytest.raises(ValueError, match="page_table holds"):
        attend(good, int32(good.shape[1] * 16 + 1), case.packed)
    for ids in ((PACKED_PAGE,), (packed_pages,), (-2,)):
        with pytest.raises(ValueError, match="packed page"):
            pack_pages(case.kv, case.packed, int32(0), int32(*ids))
        with pytest.raises(ValueError, match="page"):
            unpack_pages(case.packed, case.kv, int32(*ids), int32(0))
    check(attend(good, int32(40), case.packed), case, None)


def test_packed_pages_of_another_model_are_refused(make_kv: MakeKV) -> None:
    case = make_packed_case(make_kv, "int8", [40])
    other = make_kv(num_layers=3, page_tokens=16)
    q = torch.zeros(1, 4, 8)
    with pytest.raises(ValueError, match="packed pages are of"):
        decode_attention(q, other, 0, case.table, int32(40), SCALE, None, packed=case.packed)
    with pytest.raises(ValueError, match="packed pages are of"):
        pack_pages(other, case.packed, int32(0), int32(0))
    with pytest.raises(ValueError, match="targets"):
        pack_pages(case.kv, case.packed, int32(0), int32(0, 1))
    with pytest.raises(ValueError, match="twice"):
        pack_pages(case.kv, case.packed, int32(0, 1), int32(1, 1))


def test_formats_say_what_they_take() -> None:
    for page_tokens, head_dim, name in ((64, 64, "int2"), (24, 64, "int8"), (8, 64, "int8")):
        with pytest.raises(ValueError, match=str(name if name == "int2" else page_tokens)):
            PackedFormat(name, page_tokens, head_dim)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_dim is 12"):
        PackedFormat("int4", 16, 12)
    for head_dim, most in ((64, {"int8": 8867, "int4": 4756}), (128, {"int4": 9316})):
        for format_name, size in most.items():
            assert PackedFormat(format_name, 64, head_dim).head_bytes <= size  # type: ignore[arg-type]
    assert PackedFormat("int4", 64, 64).page_bytes(30, 3) % 256 == 0
