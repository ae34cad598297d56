"""Sinks and packed pages together: sinks may lie in pages of either format, or of both."""

from collections.abc import Callable
from itertools import pairwise

import memd_kernels
import pytest
import torch
from memd_kernels import Sinks, reference
from memd_kernels.formats import PACKED_PAGE, FormatName
from memd_kernels.plan import DecodePlan
from memd_kernels.triton.decode import decode_attention
from memd_kernels.triton.plan import plan_decode
from memd_kernels.triton.prefill import prefill_attention
from memd_kernels.triton.shared_prefix import shared_prefix_attention
from torch import Tensor

from .conftest import MakeKV
from .packed_case import PackedCase, make_packed_case
from .test_attention import LAYER, SCALE, int32
from .test_sinks import naive

Attention = Callable[..., Tensor]
# format, which pages are packed, window, sinks: in a full page, a packed one, both, a whole one
TOGETHER = [
    ("int8", "middle", 33, 4),
    ("int4", "middle", 50, 20),
    ("int8", "all", 20, 4),
    ("int4", "shuffled", 7, 40),
    ("fp8", "shuffled", 60, 16),
    ("int8", "all", 200, 17),
]


@pytest.fixture
def where(request: pytest.FixtureRequest, device: torch.device) -> torch.device:
    """Plain torch is tested on the CPU, Triton where it runs."""
    plain = getattr(request.getfixturevalue("attention"), "__module__", "").startswith(
        "memd_kernels.reference"
    )
    return torch.device("cpu") if plain else device


def hide(case: PackedCase, lens: list[int], window: int, sinks: int) -> None:
    """NaN in every whole page that the last token of a sequence does not see."""
    page_tokens = case.kv.shape[5]
    for row, length in enumerate(lens):
        first, last = -(-sinks // page_tokens), max(length - window, 0) // page_tokens
        for page in case.table[row, first:last].tolist():
            if page & PACKED_PAGE:
                memory = case.packed.memory
                memory[divmod(page ^ PACKED_PAGE, memory.shape[1])] = 255
            else:
                case.kv[divmod(page, case.kv.shape[1])] = torch.nan


def check(
    out: Tensor, case: PackedCase, sink_q: Tensor, window: int, sinks: int, rows: list[slice]
) -> None:
    bound = 2e-5 if out.dtype == torch.float32 else 4e-3
    for own, content in zip(rows, case.contents, strict=True):
        found = out[own].cpu().double()
        if not content.shape[2]:
            assert not found.any()
            continue
        expected = naive(case.q[own].cpu(), sink_q[own].cpu(), content, window, sinks)
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def one_by_one(count: int) -> list[slice]:
    return [slice(row, row + 1) for row in range(count)]


@pytest.mark.parametrize("attention", [reference.decode_attention, decode_attention])
@pytest.mark.parametrize(("name", "order", "window", "sinks"), TOGETHER)
def test_decode(
    make_kv: MakeKV,
    where: torch.device,
    attention: Attention,
    name: FormatName,
    order: str,
    window: int,
    sinks: int,
) -> None:
    lens = [1, 16, 0, 45, 90]
    case = make_packed_case(make_kv, name, lens, order=order, head_dim=16)
    hide(case, lens, window, sinks)
    case = case.to(where)
    sink_q = torch.randn(case.q.shape).to(where)
    kv_lens = int32(*lens).to(where)
    out = attention(
        *(case.q, case.kv, LAYER, case.table, kv_lens, SCALE, window),
        sinks=Sinks(sinks, sink_q),
        packed=case.packed,
    )
    check(out, case, sink_q, window, sinks, one_by_one(len(lens)))


def test_decode_in_half_precision_by_one_plan(make_kv: MakeKV, device: torch.device) -> None:
    lens, window, sinks = [300, 130], 200, 33
    shape = {"page_tokens": 32, "head_dim": 40, "dtype": torch.float16}
    case = make_packed_case(make_kv, "int4", lens, heads=6, **shape).to(device)
    sink_q = torch.randn(case.q.shape).half().to(device)
    kv_lens = int32(*lens).to(device)
    plan = plan_decode(kv_lens, case.kv, 6, window, None, sinks, case.table, case.packed)
    assert isinstance(plan, DecodePlan)
    for _ in range(2):
        out = decode_attention(
            *(case.q, case.kv, LAYER, case.table, kv_lens, SCALE, window, plan),
            sinks=Sinks(sinks, sink_q),
            packed=case.packed,
        )
        check(out, case, sink_q, window, sinks, one_by_one(len(lens)))
        assert not plan.counters.any()


@pytest.mark.parametrize("order", ["middle", "shuffled", "all"])
@pytest.mark.parametrize(("window", "sinks"), [(300, 4), (300, 40), (20, 650)])
def test_items_read_each_seen_token_once(
    make_kv: MakeKV, device: torch.device, order: str, window: int, sinks: int
) -> None:
    lens = [640, 3, 0, 900, 97]
    case = make_packed_case(make_kv, "int4", lens, page_tokens=32, order=order)
    plan = plan_decode(
        *(int32(*lens).to(device), case.kv.to(device), 4, window, None, sinks),
        *(case.table.to(device), case.to(device).packed),
    )
    tile, items = plan.config.block_n, plan.items.tolist()
    used = [item for item in items if item[0] >= 0]
    assert items[: len(used)] == used
    items = used = sorted(used, key=lambda item: item[11])
    assert [item[11] for item in items] == list(range(len(items)))
    for row, length in enumerate(lens):
        own = [item for item in used if item[0] == row]
        assert own
        assert [items[own[0][3] + index] for index in range(own[0][4])] == own
        read = {"sinks": [0] * length, "window": [0] * length}
        for item in own:
            _, begin, end, _, _, stop, start, _, is_packed, gap_at, gap, _ = item
            for index in range(begin, end):
                at = index + gap if not is_packed and index >= gap_at else index
                if bool(case.table[row, at * tile // 32] & PACKED_PAGE) != is_packed:
                    continue
                for token in range(max(at * tile, start), min((at + 1) * tile, stop)):
                    read["sinks" if start < sinks else "window"][token] += 1
        leading = min(sinks, length)
        first = min(max(length - window, sinks), length)
        assert read["sinks"] == [1] * leading + [0] * (length - leading)
        assert read["window"] == [0] * first + [1] * (length - first)


@pytest.mark.parametrize("attention", [reference.shared_prefix_attention, shared_prefix_attention])
@pytest.mark.parametrize(("name", "window", "sinks"), [("int4", 60, 18), ("int8", 30, 70)])
def test_shared_prefix(
    make_kv: MakeKV,
    where: torch.device,
    attention: Attention,
    name: FormatName,
    window: int,
    sinks: int,
) -> None:
    lens = [90, 75, 20]
    case = make_packed_case(make_kv, name, lens, order="shuffled")
    case.contents[1][:, :, :48] = case.contents[0][:, :, :48]
    case.table[1, :3] = case.table[0, :3]
    case = case.to(where)
    sink_q = torch.randn(case.q.shape).to(where)
    out = attention(
        *(case.q, case.kv, LAYER, case.table, int32(*lens).to(where)),
        *(torch.tensor([[0, 2, 3]], dtype=torch.int32, device=where), SCALE, window),
        sinks=Sinks(sinks, sink_q),
        packed=case.packed,
    )
    check(out, case, sink_q, window, sinks, one_by_one(len(lens)))


@pytest.mark.parametrize("attention", [reference.prefill_attention, prefill_attention])
@pytest.mark.parametrize(("name", "order", "window", "sinks"), TOGETHER)
def test_prefill(
    make_kv: MakeKV,
    where: torch.device,
    attention: Attention,
    name: FormatName,
    order: str,
    window: int,
    sinks: int,
) -> None:
    lens, rows = [100, 3, 33, 0], [40, 3, 1, 2]
    case = make_packed_case(make_kv, name, lens, rows=sum(rows), order=order, head_dim=16)
    case = case.to(where)
    sink_q = torch.randn(case.q.shape).to(where)
    starts = [0, *torch.tensor(rows).cumsum(0).tolist()]
    out = attention(
        *(case.q, case.kv, LAYER, case.table, int32(*starts).to(where)),
        *(int32(*lens).to(where), SCALE, window),
        sinks=Sinks(sinks, sink_q),
        packed=case.packed,
    )
    own = [slice(start, stop) for start, stop in pairwise(starts)]
    check(out, case, sink_q, window, sinks, own)


@pytest.mark.parametrize("count", [0, 4])
def test_a_cpu_leaves_packed_pages_to_plain_torch(make_kv: MakeKV, count: int) -> None:
    lens, window = [90, 40], 50
    case = make_packed_case(make_kv, "int8", lens)
    kv_lens = int32(*lens)
    sinks = Sinks(count, torch.randn(case.q.shape)) if count else None
    plan = memd_kernels.plan_decode(
        kv_lens, case.kv, 4, window, None, count, case.table, case.packed
    )
    arguments = (case.q, case.kv, LAYER, case.table, kv_lens)
    expected = reference.decode_attention(
        *arguments, SCALE, window, sinks=sinks, packed=case.packed
    )
    for given in (plan, None, memd_kernels.plan_decode(kv_lens, case.kv, 4, window)):
        out = memd_kernels.decode_attention(
            *arguments, SCALE, window, given, sinks=sinks, packed=case.packed
        )
        assert torch.equal(out, expected)
    groups = torch.zeros(1, 3, dtype=torch.int32)
    out = memd_kernels.shared_prefix_attention(
        *arguments, groups, SCALE, window, sinks=sinks, packed=case.packed
    )
    assert torch.equal(out, expected)
