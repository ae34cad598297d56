"""The prefill kernel against the reference in float64: NaN-filled memory, shuffled pages."""

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from memd_kernels import reference
from memd_kernels.triton.decode import decode_attention
from memd_kernels.triton.prefill import PrefillConfig, launch, prefill_attention
from torch import Tensor

from .conftest import MakeKV

LAYER = 1
SCALE = 0.3
NO_PAGE = 2**30  # an entry of the page table that must not be followed


@dataclass
class Batch:
    q: Tensor
    kv: Tensor
    table: Tensor
    starts: Tensor
    lens: Tensor

    def arguments(self, window: int | None) -> tuple[object, ...]:
        return self.q, self.kv, LAYER, self.table, self.starts, self.lens, SCALE, window

    def expected(self, window: int | None) -> Tensor:
        table = self.table.where(self.table != NO_PAGE, 0)
        rows = slice(0, int(self.starts[-1]))
        wide = self.q[rows].double(), self.kv.double()
        return reference.prefill_attention(
            *wide, LAYER, table, self.starts, self.lens, SCALE, window
        )


def make_batch(kv: Tensor, lens: list[int], rows: list[int], group: int, padding: int = 0) -> Batch:
    """Sequences on random pages, whose last `rows` tokens are queries; `padding` rows of none."""
    generator = torch.Generator().manual_seed(len(lens))
    page_tokens = kv.shape[5]
    counts = [-(-length // page_tokens) for length in lens]
    free = torch.randperm(kv.shape[0] * kv.shape[1], generator=generator).tolist()
    table = torch.full((len(lens), max(counts) + 1), NO_PAGE, dtype=torch.int32)
    for row, length in enumerate(lens):
        for index in range(counts[row]):
            page = free.pop()
            table[row, index] = page
            filled = kv[divmod(page, kv.shape[1])][
                LAYER, :, :, : min(page_tokens, length - index * page_tokens)
            ]
            filled.copy_(torch.randn(filled.shape, generator=generator))
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0)], dtype=torch.int32)
    shape = (sum(rows) + padding, group * kv.shape[4], kv.shape[6])
    q = torch.randn(shape, generator=generator).to(kv)
    device = kv.device
    lengths = torch.tensor(lens, dtype=torch.int32)
    return Batch(q, kv, table.to(device), starts.to(device), lengths.to(device))


def tolerance(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 4e-3


@pytest.mark.parametrize("window", [None, 1, 9, 40])
@pytest.mark.parametrize(("page_tokens", "head_dim"), [(16, 64), (64, 80), (32, 8)])
def test_matches_reference(
    make_kv: MakeKV, device: torch.device, window: int | None, page_tokens: int, head_dim: int
) -> None:
    kv = make_kv(20, 3, page_tokens=page_tokens, head_dim=head_dim, waste=5, device=device)
    # A chunk over a prefix, a whole prompt, a single token, nothing new, and padding.
    batch = make_batch(kv, [77, 33, 20, 16, 0], [20, 33, 1, 0, 2], group=3, padding=4)
    out = prefill_attention(*batch.arguments(window))
    total = int(batch.starts[-1])
    torch.testing.assert_close(out[:total].double(), batch.expected(window), rtol=2e-5, atol=2e-5)
    assert not out[total - 2 :].any()


@pytest.mark.parametrize(("window", "dtype"), [(None, torch.float16), (25, torch.float32)])
@pytest.mark.parametrize(
    "config",
    [
        PrefillConfig(rows=16, keys=64, num_warps=4, num_stages=2),
        PrefillConfig(rows=64, keys=16, num_warps=4, num_stages=2, pack=False),
        PrefillConfig(rows=32, keys=16, num_warps=4, num_stages=2, variant="tma"),
    ],
)
def test_every_cut_gives_the_same(
    make_kv: MakeKV,
    device: torch.device,
    window: int | None,
    config: PrefillConfig,
    dtype: torch.dtype,
) -> None:
    # Descriptors need storage on 16 bytes, which `make_kv` shifts by 5 elements.
    kv = make_kv(12, 3, page_tokens=16, head_dim=64, dtype=dtype, device=device)
    kv = torch.empty_strided(kv.shape, kv.stride(), dtype=dtype, device=device).fill_(torch.nan)
    batch = make_batch(kv, [90, 47, 17], [50, 47, 2], group=2)
    out = launch(*batch.arguments(window), config)
    limit = tolerance(dtype)
    torch.testing.assert_close(out.double(), batch.expected(window), rtol=limit, atol=limit)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper card",
)
@pytest.mark.parametrize(
    ("page_tokens", "window", "config"),
    [
        (16, None, PrefillConfig(128, 128, 4, 2, "hopper")),
        (64, 33, PrefillConfig(128, 128, 4, 2, "hopper", overlap=False)),
        (128, 9, PrefillConfig(128, 128, 4, 2, "hopper", pack=False)),
    ],
    ids=["short pages", "no overlap", "unpacked"],
)
def test_the_hopper_kernel(
    make_kv: MakeKV,
    device: torch.device,
    page_tokens: int,
    window: int | None,
    config: PrefillConfig,
) -> None:
    kv = make_kv(16, 3, page_tokens=page_tokens, head_dim=128, dtype=torch.float16, device=device)
    kv = torch.empty_strided(kv.shape, kv.stride(), dtype=kv.dtype, device=device).fill_(torch.nan)
    batch = make_batch(kv, [277, 133, 20, 16, 0], [150, 133, 1, 0, 2], group=3, padding=4)
    out = launch(*batch.arguments(window), config)
    total = int(batch.starts[-1])
    torch.testing.assert_close(out[:total].double(), batch.expected(window), rtol=4e-3, atol=4e-3)
    assert not out[total - 2 :].any()


def test_lengths_change_under_the_same_launch(make_kv: MakeKV, device: torch.device) -> None:
    """Shapes stay, contents change: what a captured graph sees."""
    kv = make_kv(12, 3, page_tokens=16, head_dim=16, device=device)
    batch = make_batch(kv, [60, 40], [12, 8], group=2)
    for starts, lens in (([0, 12, 20], [60, 40]), ([0, 1, 20], [33, 40]), ([0, 0, 7], [16, 7])):
        batch.starts.copy_(torch.tensor(starts))
        batch.lens.copy_(torch.tensor(lens))
        out = prefill_attention(*batch.arguments(None))
        used = out[: starts[-1]].double()
        torch.testing.assert_close(used, batch.expected(None), rtol=2e-5, atol=2e-5)
        assert not out[starts[-1] :].any()


@pytest.mark.parametrize("before", [1, 21, 70])
@pytest.mark.parametrize(
    "config", [None, PrefillConfig(rows=32, keys=16, num_warps=4, num_stages=2, variant="tma")]
)
def test_rows_before_the_first_sequence_are_left_as_they_are(
    make_kv: MakeKV, device: torch.device, before: int, config: PrefillConfig | None
) -> None:
    kv = make_kv(12, 3, page_tokens=16, head_dim=64, device=device)
    kv = torch.empty_strided(kv.shape, kv.stride(), device=device).fill_(torch.nan)
    batch = make_batch(kv, [60, 40], [50, 8], group=2, padding=2)
    dense = prefill_attention(*batch.arguments(None))
    batch.q = torch.cat((batch.q.new_full((before, *batch.q.shape[1:]), torch.nan), batch.q))
    batch.starts += before
    out = torch.full_like(batch.q, 7)
    if config is None:
        assert prefill_attention(*batch.arguments(None), out=out) is out
    else:
        launch(*batch.arguments(None), config, out=out)
    assert bool((out[:before] == 7).all())
    torch.testing.assert_close(out[before:], dense, rtol=2e-5, atol=2e-5)
    if config is None:
        expected = torch.full_like(batch.q, 7)
        batch.table[batch.table == NO_PAGE] = 0
        reference.prefill_attention(*batch.arguments(None), out=expected)
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("functions", [reference, None])
def test_chunks_begin_where_decoding_rows_end(
    make_kv: MakeKV, device: torch.device, functions: ModuleType | None
) -> None:
    """Decoding rows have padding, in which chunks already have theirs."""
    kv = make_kv(20, 3, page_tokens=16, head_dim=64, device=device)
    batch = make_batch(kv, [30, 41, 60, 40], [1, 1, 20, 8], group=2)
    batch.table[batch.table == NO_PAGE] = 0
    expected = reference.prefill_attention(*batch.arguments(None))
    out = torch.full_like(batch.q, torch.nan)
    table = torch.cat((batch.table[:2], batch.table.new_zeros(5, batch.table.shape[1])))
    lens = torch.cat((batch.lens[:2], batch.lens.new_zeros(5)))
    decode = decode_attention if functions is None else functions.decode_attention
    prefill = prefill_attention if functions is None else functions.prefill_attention
    decode(batch.q[:7], kv, LAYER, table, lens, SCALE, None, out=out[:7])
    prefill(
        *(batch.q, kv, LAYER, batch.table[2:], batch.starts[2:], batch.lens[2:], SCALE, None),
        out=out,
    )
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match="out is"):
        prefill(*batch.arguments(None), out=out[1:])
    with pytest.raises(ValueError, match="out is"):
        decode(batch.q[:7], kv, LAYER, table, lens, SCALE, None, out=out[:7, :, ::2])


def test_queries_may_be_part_of_a_wider_tensor(make_kv: MakeKV, device: torch.device) -> None:
    kv = make_kv(12, 3, page_tokens=16, head_dim=16, device=device)
    batch = make_batch(kv, [30], [9], group=2)
    dense = prefill_attention(*batch.arguments(None))
    wide = torch.full((9, 8, 16), torch.nan, device=device)
    wide[:, :4] = batch.q
    batch.q = wide[:, :4]
    assert torch.equal(prefill_attention(*batch.arguments(None)), dense)


def test_nothing_to_do(make_kv: MakeKV, device: torch.device) -> None:
    kv = make_kv(page_tokens=16, device=device)
    empty = torch.zeros(1, dtype=torch.int32, device=device)
    out = prefill_attention(
        torch.empty(0, 4, 8, device=device), kv, 0, empty[:0, None], empty, empty[:0], SCALE, None
    )
    assert out.shape == (0, 4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lens": torch.tensor([30])}, "kv_lens"),
        ({"starts": torch.tensor([0, 3, 9], dtype=torch.int32)}, "query_starts"),
        ({"table": torch.zeros(2, 4, dtype=torch.int32)}, "page_table"),
        ({"q": torch.zeros(9, 3, 16)}, "heads"),
    ],
)
def test_refuses(make_kv: MakeKV, change: dict[str, Tensor], message: str) -> None:
    batch = make_batch(make_kv(12, 3, page_tokens=16, head_dim=16), [30], [9], group=2)
    for name, tensor in change.items():
        setattr(batch, name, tensor)
    with pytest.raises(ValueError, match=message):
        prefill_attention(*batch.arguments(None))


def test_refuses_pages_and_windows_it_cannot_take(make_kv: MakeKV) -> None:
    batch = make_batch(make_kv(12, 3, page_tokens=16, head_dim=16), [30], [9], group=2)
    with pytest.raises(ValueError, match="window"):
        prefill_attention(*batch.arguments(0))
    batch.kv = make_kv(12, 3, page_tokens=8, head_dim=16)
    with pytest.raises(ValueError, match="page_tokens"):
        prefill_attention(*batch.arguments(None))
