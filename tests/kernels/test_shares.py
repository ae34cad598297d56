"""Each page's share of decode attention: exactly in plain torch, by parts in Triton."""

import pytest
import torch
from memd_kernels import Sinks, decode_attention, plan_decode, reference
from memd_kernels.triton import decode as triton_decode
from memd_kernels.triton import plan as triton_plan
from torch import Tensor

from .conftest import MakeKV
from .test_attention import LAYER, SCALE, int32
from .test_triton_decode import check, make_case

LENS = [1, 0, 65, 300]


def exact(
    q: Tensor, contents: list[Tensor], page_tokens: int, width: int, window: int | None = None
) -> Tensor:
    """Shares [B, width] in float64 from the keys alone."""
    shares = torch.zeros(len(contents), width, dtype=torch.float64)
    for row, content in enumerate(contents):
        length = content.shape[2]
        if not length:
            continue
        keys = content[0].double().repeat_interleave(q.shape[1] // content.shape[1], 0)
        scores = torch.einsum("hd,hkd->hk", q[row].double(), keys) * SCALE
        if window is not None:
            scores[:, : max(0, length - window)] = -torch.inf
        weights = scores.softmax(1).mean(0)
        shares[row].index_add_(0, torch.arange(length) // page_tokens, weights)
    return shares


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "page_tokens"), [(2, 16), (6, 4), (4, 64)])
def test_plain_torch_has_them_exactly(
    make_kv: MakeKV, heads: int, page_tokens: int, window: int | None
) -> None:
    """And adds them to what is there; the output is what it is without them."""
    q, kv, table, contents = make_case(
        make_kv, torch.device("cpu"), LENS, heads, window, page_tokens=page_tokens
    )
    lens = int32(*LENS)
    expected = exact(q, contents, page_tokens, table.shape[1], window)
    plan = plan_decode(lens, kv, heads, window, page_table=table, shares=True)
    shares = torch.ones(table.shape)
    out = decode_attention(q, kv, LAYER, table, lens, SCALE, window, plan, shares=shares)
    torch.testing.assert_close(shares.double(), expected + 1, rtol=1e-5, atol=1e-5)
    check(out, q, contents, window)


def test_those_of_sinks_count_for_their_page(make_kv: MakeKV) -> None:
    lens = [70]
    q, kv, table, contents = make_case(make_kv, torch.device("cpu"), lens, 2)
    shares = torch.zeros(table.shape)
    decode_attention(q, kv, LAYER, table, int32(*lens), SCALE, 20, sinks=Sinks(4, q), shares=shares)
    keys = contents[0][0].double()
    scores = torch.einsum("hd,hkd->hk", q[0].double(), keys) * SCALE
    scores[:, 4:50] = -torch.inf
    weights = scores.softmax(1).mean(0).view(1, 70)
    expected = [weights[0, :16].sum(), 0, 0, weights[0, 48:64].sum(), weights[0, 64:].sum()]
    torch.testing.assert_close(shares[0, :5].double(), torch.tensor(expected).double())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "page_tokens", "window", "dtype", "longest"),
    [
        (6, 2, 16, None, torch.float32, 300),
        (3, 1, 64, 270, torch.float32, 300),
        (4, 1, 512, None, torch.float16, 300),  # parts end inside a page
        (4, 2, 64, None, torch.float32, 1300),  # parts are put together in two stages
    ],
)
def test_triton_divides_a_parts_share_among_its_pages(
    make_kv: MakeKV,
    device: torch.device,
    heads: int,
    kv_heads: int,
    page_tokens: int,
    window: int | None,
    dtype: torch.dtype,
    longest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if longest > LENS[-1]:
        monkeypatch.setattr(triton_plan, "SHARE_TOKENS", 64)
    sizes = [*LENS[:-1], longest]
    shape = {"kv_heads": kv_heads, "page_tokens": page_tokens, "dtype": dtype}
    q, kv, table, contents = make_case(make_kv, device, sizes, heads, window, **shape)
    lens = int32(*sizes).to(device)
    plan = triton_plan.plan_decode(lens, kv, heads, window, page_table=table, shares=True)
    shares = torch.zeros(table.shape, device=device)
    for _ in range(2):  # a plan serves many layers
        out = triton_decode.decode_attention(
            q, kv, LAYER, table, lens, SCALE, window, plan, shares=shares
        )
    check(out, q, contents, window)
    of_tokens = exact(q.cpu(), contents, 1, table.shape[1] * page_tokens, window)
    expected = torch.zeros(table.shape, dtype=torch.float64)
    parts = 0
    for row, first, end, _, _, stop, start, _ in plan.items.tolist():
        if row < 0:
            continue
        parts += 1
        begin, end = max(first * plan.config.block_n, start), min(end * plan.config.block_n, stop)
        assert end - begin <= triton_plan.SHARE_TOKENS
        if end > begin:
            pages = torch.arange(begin, end) // page_tokens
            each = of_tokens[row, begin:end].mean().expand(end - begin)
            expected[row].index_add_(0, pages, each)
    assert parts > (len(sizes) if longest == LENS[-1] else 18)
    bound = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(shares.cpu().double(), 2 * expected, rtol=bound, atol=bound)
    rows = torch.tensor([float(bool(length)) for length in sizes]).double()
    torch.testing.assert_close(shares.cpu().double().sum(1), 2 * rows, rtol=bound, atol=bound)


def test_a_wrong_place_for_them_is_refused(make_kv: MakeKV, device: torch.device) -> None:
    q, kv, table, _ = make_case(make_kv, device, [20], 2)
    lens = int32(20).to(device)
    for shares in (
        torch.zeros(1, table.shape[1] + 1, device=device),
        torch.zeros(table.shape, dtype=torch.float64, device=device),
    ):
        for function in (reference.decode_attention, triton_decode.decode_attention):
            with pytest.raises(ValueError, match="shares is"):
                function(q, kv, LAYER, table, lens, SCALE, None, shares=shares)
    with pytest.raises(ValueError, match="page_table"):
        triton_plan.plan_decode(lens, kv, 2, None, shares=True)
