"""Attention sinks behind a window, reference and kernels, against a plain softmax in float64."""

from collections.abc import Callable

import pytest
import torch
from memd_kernels import Sinks, reference
from memd_kernels.plan import DecodePlan
from memd_kernels.triton.decode import decode_attention
from memd_kernels.triton.plan import plan_decode
from memd_kernels.triton.prefill import PrefillConfig, launch, prefill_attention
from memd_kernels.triton.rope import rotate_queries
from memd_kernels.triton.shared_prefix import shared_prefix_attention
from torch import Tensor

from .conftest import MakeKV
from .test_attention import LAYER, SCALE, fill, int32
from .test_triton_decode import move

Attention = Callable[..., Tensor]
LENS = [1, 4, 5, 0, 13, 40, 77]


def naive(q: Tensor, sink_q: Tensor, content: Tensor, window: int, sinks: int) -> Tensor:
    """The last tokens of one sequence, [n, heads, dim], in float64: sinks meet `sink_q`."""
    rows, heads = q.shape[:2]
    keys, values = content.double().repeat_interleave(heads // content.shape[1], 1)
    at = torch.arange(keys.shape[1] - rows, keys.shape[1])[:, None]
    key_at = torch.arange(keys.shape[1])
    scores = torch.einsum("nhd,hkd->hnk", q.double(), keys)
    leading = torch.einsum("nhd,hkd->hnk", sink_q.double(), keys)
    scores = torch.where(key_at < sinks, leading, scores) * SCALE
    seen = (key_at <= at) & ((key_at < sinks) | (key_at > at - window))
    return torch.einsum("hnk,hkd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


def make(
    make_kv: MakeKV, lens: list[int], rows: int, dtype: torch.dtype, page_tokens: int = 16
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    pages = sum(-(-length // page_tokens) for length in lens) + 2
    kv = make_kv(-(-pages // 3), page_tokens=page_tokens, head_dim=16, waste=16, dtype=dtype)
    table, contents = fill(kv, lens, [0] * len(lens))
    q, sink_q = torch.randn(2, rows, 6, 16).to(dtype)
    return q, sink_q, kv, table, contents


def on(device: torch.device, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with its tensors on a device and its result back here."""

    def moved(argument: object) -> object:
        if isinstance(argument, Sinks):
            return Sinks(argument.count, argument.q.to(device))
        if isinstance(argument, Tensor):  # what is not dense would lose its strides
            return move(argument, device) if argument.ndim == 7 else argument.to(device)
        return argument

    def call(*arguments: object, **named: object) -> Tensor:
        moved_named = {name: moved(argument) for name, argument in named.items()}
        return function(*map(moved, arguments), **moved_named).cpu()

    return call


def hide(kv: Tensor, table: Tensor, lens: list[int], window: int, sinks: int) -> None:
    """NaN in every whole page that the last token of a sequence does not see."""
    page_tokens = kv.shape[5]
    for row, length in enumerate(lens):
        first, last = -(-sinks // page_tokens), max(length - window, 0) // page_tokens
        for page in table[row, first:last].tolist():
            kv[divmod(page, kv.shape[1])] = torch.nan


@pytest.mark.parametrize("attention", [reference.decode_attention, decode_attention])
@pytest.mark.parametrize(("window", "sinks"), [(1, 4), (20, 1), (33, 16), (7, 17), (100, 4)])
def test_decode(
    make_kv: MakeKV, device: torch.device, attention: Attention, window: int, sinks: int
) -> None:
    q, sink_q, kv, table, contents = make(make_kv, LENS, len(LENS), torch.float32)
    hide(kv, table, LENS, window, sinks)
    arguments = q, kv, LAYER, table, int32(*LENS), SCALE, window
    out = on(device, attention)(*arguments, sinks=Sinks(sinks, sink_q))
    for row, (length, content) in enumerate(zip(LENS, contents, strict=True)):
        if not length:
            assert not out[row].any()
            continue
        one = slice(row, row + 1)
        expected = naive(q[one], sink_q[one], content, window, sinks)
        torch.testing.assert_close(out[one].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", [reference.decode_attention, decode_attention])
def test_decode_in_half_precision(
    make_kv: MakeKV, device: torch.device, attention: Attention
) -> None:
    dtype = torch.float16
    lens = [200, 9]
    q, sink_q, kv, table, contents = make(make_kv, lens, 2, dtype)
    attend = on(device, attention)
    out = attend(q, kv, LAYER, table, int32(*lens), SCALE, 50, sinks=Sinks(4, sink_q))
    for row, content in enumerate(contents):
        one = slice(row, row + 1)
        expected = naive(q[one], sink_q[one], content, 50, 4)
        error = (out[one].double() - expected).abs().max()
        assert error < 4 * torch.finfo(dtype).eps * expected.abs().max()


def test_one_plan_serves_launches_and_parts_are_joined(
    make_kv: MakeKV, device: torch.device
) -> None:
    lens = [230, 3]
    q, sink_q, kv, table, contents = make(make_kv, lens, 2, torch.float32)
    kv = move(kv, device)
    plan = plan_decode(int32(*lens).to(device), kv, 6, 150, sinks=4)
    assert isinstance(plan, DecodePlan)
    assert (plan.items[:, 4] > 1).any()
    for _ in range(2):
        attend = on(device, decode_attention)
        out = attend(q, kv, LAYER, table, int32(*lens), SCALE, 150, plan, Sinks(4, sink_q))
        expected = naive(q[:1], sink_q[:1], contents[0], 150, 4)
        torch.testing.assert_close(out[:1].double(), expected, rtol=1e-5, atol=1e-5)
        assert not plan.counters.any()


@pytest.mark.parametrize("attention", [reference.shared_prefix_attention, shared_prefix_attention])
def test_shared_prefix(make_kv: MakeKV, device: torch.device, attention: Attention) -> None:
    lens = [90, 75, 20]
    q, sink_q, kv, table, contents = make(make_kv, lens, 3, torch.float32)
    contents[1][:, :, :32] = contents[0][:, :, :32]
    table[1, :2] = table[0, :2]
    out = on(device, attention)(
        *(q, kv, LAYER, table, int32(*lens), torch.tensor([[0, 2, 2]], dtype=torch.int32)),
        *(SCALE, 60),
        sinks=Sinks(18, sink_q),
    )
    for row, content in enumerate(contents):
        one = slice(row, row + 1)
        expected = naive(q[one], sink_q[one], content, 60, 18)
        torch.testing.assert_close(out[one].double(), expected, rtol=1e-5, atol=1e-5)


CUTS = [
    PrefillConfig(rows=16, keys=64, num_warps=4, num_stages=2),
    PrefillConfig(rows=64, keys=16, num_warps=4, num_stages=2, pack=False),
    PrefillConfig(rows=32, keys=16, num_warps=4, num_stages=2, variant="tma"),
]


def _cut(config: PrefillConfig) -> Attention:
    def attend(*arguments: object, sinks: Sinks) -> Tensor:
        return launch(*arguments, config, sinks)  # type: ignore[arg-type]

    return attend


@pytest.mark.parametrize(
    "attention", [reference.prefill_attention, prefill_attention, *map(_cut, CUTS)]
)
@pytest.mark.parametrize(("window", "sinks"), [(1, 4), (25, 20), (300, 4)])
def test_prefill(
    make_kv: MakeKV, device: torch.device, attention: Attention, window: int, sinks: int
) -> None:
    lens, rows = [70, 3, 17, 0], [30, 3, 1, 2]
    q, sink_q, kv, table, contents = make(make_kv, lens, sum(rows), torch.float32)
    kv = torch.empty_strided(kv.shape, kv.stride()).copy_(kv)  # descriptors need 16 bytes
    starts = [0, *torch.tensor(rows).cumsum(0).tolist()]
    arguments = q, kv, LAYER, table, int32(*starts), int32(*lens), SCALE, window
    out = on(device, attention)(*arguments, sinks=Sinks(sinks, sink_q))
    for row, content in enumerate(contents):
        own = slice(starts[row], starts[row + 1])
        if not lens[row]:
            assert not out[own].any()
            continue
        expected = naive(q[own], sink_q[own], content, window, sinks)
        torch.testing.assert_close(out[own].double(), expected, rtol=1e-5, atol=1e-5)


def test_prefill_longer_than_a_tile(make_kv: MakeKV) -> None:
    q, sink_q, kv, table, contents = make(make_kv, [700], 650, torch.float32)
    arguments = q, kv, LAYER, table, int32(0, 650), int32(700), SCALE, 100
    out = reference.prefill_attention(*arguments, sinks=Sinks(4, sink_q))
    expected = naive(q, sink_q, contents[0], 100, 4)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("half", [32, 20])
def test_rotation_of_queries_is_that_of_rope_and_store(
    make_kv: MakeKV, device: torch.device, normed: bool, half: int
) -> None:
    kv = make_kv(head_dim=64)
    wide = torch.randn(5, 10, 64)
    q, k, v = wide.split((6, 2, 2), 1)
    cos, sin = torch.randn(2, 5, half)
    norm = torch.rand(64) if normed else None
    stored = reference.rope_and_store(
        q, k, v, cos, sin, kv, 0, torch.zeros(5, dtype=torch.int32),
        torch.tensor([0, 1, 2, 3, 0]), norm, norm, 1e-5,
    )  # fmt: skip
    before = q.clone()
    for rotate in (reference.rotate_queries, rotate_queries):
        torch.testing.assert_close(on(device, rotate)(q, cos, sin, norm, 1e-5), stored)
    assert torch.equal(q, before)


def test_wrong_sinks_are_refused(make_kv: MakeKV) -> None:
    q, sink_q, kv, table, _ = make(make_kv, [20], 1, torch.float32)

    def decode(window: int | None, sinks: Sinks) -> None:
        for attention in (reference.decode_attention, decode_attention):
            with pytest.raises(ValueError, match="sinks"):
                attention(q, kv, LAYER, table, int32(20), SCALE, window, sinks=sinks)
        for prefill in (reference.prefill_attention, prefill_attention):
            starts, lens = int32(0, 1), int32(20)
            with pytest.raises(ValueError, match="sinks"):
                prefill(q, kv, LAYER, table, starts, lens, SCALE, window, sinks)

    decode(None, Sinks(4, sink_q))
    decode(8, Sinks(0, sink_q))
    decode(8, Sinks(-1, sink_q))
    decode(8, Sinks(4, sink_q[:, :2]))
    decode(8, Sinks(4, sink_q.double()))
    for plan in (reference.plan_decode, plan_decode):
        with pytest.raises(ValueError, match="sinks is 4 with window None"):
            plan(int32(20), kv, 6, None, sinks=4)
