"""Decode attention in Triton against a plain softmax in float64, with and without shared prefixes.

Free pages and slots past a length hold NaN, page tables end in numbers that are no pages.
"""

from itertools import pairwise

import pytest
import torch
from memd_kernels import launch
from memd_kernels.launch import LaunchConfig
from memd_kernels.plan import DecodePlan
from memd_kernels.triton.decode import decode_attention
from memd_kernels.triton.decode_launch import mixed_registers
from memd_kernels.triton.plan import plan_decode
from memd_kernels.triton.shared_prefix import shared_prefix_attention
from torch import Tensor

from .conftest import MakeKV, UseLaunches
from .test_attention import LAYER, SCALE, fill, first_seen, int32, naive

NO_PAGE = 2**30
# Products of the same inputs in the same precision; sums are in float32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def make_case(
    make_kv: MakeKV,
    device: torch.device,
    lens: list[int],
    heads: int,
    window: int | None = None,
    *,
    kv_heads: int = 2,
    page_tokens: int = 16,
    head_dim: int = 16,
    waste: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """q, kv and page table on the device, and the contents of each sequence on the host."""
    pages = sum(-(-length // page_tokens) for length in lens) + 2
    kv = make_kv(
        num_blocks=-(-pages // 3),
        num_kv_heads=kv_heads,
        page_tokens=page_tokens,
        head_dim=head_dim,
        waste=waste,
        dtype=dtype,
    )
    table, contents = fill(kv, lens, [first_seen(length, 1, window) for length in lens])
    for row, length in enumerate(lens):
        table[row, -(-length // page_tokens) :] = NO_PAGE
    q = torch.randn(len(lens), heads, head_dim).to(dtype)
    return q.to(device), move(kv, device), table.to(device), contents


def move(kv: Tensor, device: torch.device) -> Tensor:
    """The same strides on another device."""
    if kv.device == device:
        return kv
    storage = torch.full((kv.untyped_storage().nbytes() // kv.itemsize,), torch.nan, dtype=kv.dtype)
    moved = storage.to(device).as_strided(kv.shape, kv.stride(), kv.storage_offset())
    return moved.copy_(kv)


def check(out: Tensor, q: Tensor, contents: list[Tensor], window: int | None) -> None:
    """Rows against float64; rows of padding are zeros."""
    out, q = out.cpu(), q.cpu()
    bound = TOLERANCE[out.dtype]
    for row, content in enumerate(contents):
        if content.shape[2] == 0:
            assert not out[row].any()
            continue
        expected = naive(q[row : row + 1], content, window)
        torch.testing.assert_close(out[row : row + 1].double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_tokens", "window", "dtype"),
    [
        (2, 2, 16, 16, None, torch.float32),
        (6, 2, 24, 16, None, torch.float32),
        (8, 2, 40, 32, 20, torch.float32),
        (8, 1, 64, 64, 1, torch.float32),
        (3, 1, 80, 16, None, torch.float16),  # pages shorter than a tile
        (8, 2, 16, 16, 33, torch.float16),
        (4, 1, 128, 128, 70, torch.float16),  # pages longer than a tile
    ],
)
def test_decode(
    make_kv: MakeKV,
    device: torch.device,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_tokens: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    lens = [1, 0, 65, 16, 201, 64]
    shape = {"kv_heads": kv_heads, "head_dim": head_dim, "page_tokens": page_tokens}
    q, kv, table, contents = make_case(
        make_kv, device, lens, heads, window, waste=8, dtype=dtype, **shape
    )
    out = decode_attention(q, kv, LAYER, table, int32(*lens).to(device), SCALE, window)
    check(out, q, contents, window)


def test_a_row_is_the_same_after_other_layers(make_kv: MakeKV, device: torch.device) -> None:
    """A plan serves many launches: the counters of each row are back at zero."""
    lens = [150, 3]
    q, kv, table, contents = make_case(make_kv, device, lens, 4)
    kv_lens = int32(*lens).to(device)
    plan = plan_decode(kv_lens, kv, 4, None)
    assert (plan.items[:, 4] > 1).any()
    first = decode_attention(q, kv, LAYER, table, kv_lens, SCALE, None, plan)
    assert not plan.counters.any()
    assert torch.equal(decode_attention(q, kv, LAYER, table, kv_lens, SCALE, None, plan), first)
    check(first, q, contents, None)


def test_registers_of_packed_launches() -> None:
    """All programs of a launch run at once, unless each were left with too few registers."""
    for warps, splits, expected in ((1, 8, 255), (1, 10, 200), (1, 12, 168), (2, 12, 168)):
        config = LaunchConfig(warps, splits=splits)
        assert mixed_registers(config) == expected, (warps, splits)
    assert mixed_registers(LaunchConfig()) == 255


def test_strided_queries_and_tables(make_kv: MakeKV, device: torch.device) -> None:
    lens = [40, 9]
    q, kv, table, contents = make_case(make_kv, device, lens, 4)
    wide = torch.cat((q, torch.full_like(q, torch.nan)), 1)
    tall = torch.cat((table, torch.full_like(table, NO_PAGE)), 1)
    out = decode_attention(
        wide[:, :4], kv, LAYER, tall[:, :4], int32(*lens).to(device), SCALE, None
    )
    check(out, q, contents, None)


def read_items(plan: DecodePlan) -> list[list[int]]:
    return [item for item in plan.items.tolist() if item[0] >= 0]


@pytest.mark.parametrize("window", [None, 100])
def test_items_cover_each_sequence_once(
    make_kv: MakeKV, device: torch.device, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    kv = make_kv(page_tokens=16)
    for rows in (1, 5, 40):
        lens = torch.randint(0, 300, (rows,), generator=generator)
        lens[rows // 2] = 20_000
        plan = plan_decode(lens.int().to(device), kv, 4, window)
        items, tile = read_items(plan), plan.config.block_n
        target = len(plan.items) - rows
        lows = [first_seen(length, 1, window) for length in lens.tolist()]
        total = sum(-(-n // tile) - low // tile for n, low in zip(lens.tolist(), lows, strict=True))
        assert max(end - first for _, first, end, *_ in items) <= -(-total // target)
        for row, (length, low) in enumerate(zip(lens.tolist(), lows, strict=True)):
            own = [item for item in items if item[0] == row]
            assert own[0][1] == low // tile
            assert own[-1][2] == -(-length // tile)
            assert all(left[2] == right[1] for left, right in pairwise(own))
            assert [items[own[0][3] + index] for index in range(own[0][4])] == own
            assert {tuple(item[5:]) for item in own} == {(length, low, 0)}
        assert not plan.counters.any()


def share(table: Tensor, contents: list[Tensor], groups: list[list[int]], page_tokens: int) -> None:
    """Give the rows of each group the leading pages of its first row."""
    for first, rows, pages in groups:
        for row in range(first + 1, first + rows):
            table[row, :pages] = table[first, :pages]
            tokens = pages * page_tokens
            contents[row][:, :, :tokens] = contents[first][:, :, :tokens]


@pytest.mark.parametrize("window", [None, 30, 90])
@pytest.mark.parametrize(("heads", "dtype"), [(4, torch.float32), (3, torch.float16)])
def test_shared_prefix(
    make_kv: MakeKV, device: torch.device, window: int | None, heads: int, dtype: torch.dtype
) -> None:
    lens = [70, 66, 180, 5, 0, 97, 98]
    groups = [[0, 3, 4], [0, 0, 0], [5, 2, 6], [3, 1, 0]]
    kv_heads = 2 if heads == 4 else 1
    q, kv, table, contents = make_case(make_kv, device, lens, heads, kv_heads=kv_heads, dtype=dtype)
    share(table, contents, groups, 16)
    out = shared_prefix_attention(
        q,
        kv,
        LAYER,
        table,
        int32(*lens).to(device),
        torch.tensor(groups, dtype=torch.int32, device=device),
        SCALE,
        window,
    )
    check(out, q, contents, window)


def test_more_rows_than_a_tile_share(make_kv: MakeKV, device: torch.device) -> None:
    lens = [40 + row for row in range(21)]
    groups = [[1, 20, 2]]
    q, kv, table, contents = make_case(make_kv, device, lens, 4)
    share(table, contents, groups, 16)
    on_device = torch.tensor(groups, dtype=torch.int32, device=device)
    kv_lens = int32(*lens).to(device)
    plan = plan_decode(kv_lens, kv, 4, None, on_device)
    assert plan.prefix is not None
    assert sorted(plan.prefix.row_tiles[:, 1].tolist(), reverse=True)[:2] == [16, 4]
    out = shared_prefix_attention(q, kv, LAYER, table, kv_lens, on_device, SCALE, None, plan)
    check(out, q, contents, None)


def test_wrong_arguments_are_refused(make_kv: MakeKV, device: torch.device) -> None:
    lens = [5, 9]
    q, kv, table, _ = make_case(make_kv, device, lens, 4)
    kv_lens = int32(*lens).to(device)

    def decode(**changes: object) -> None:
        arguments = {"q": q, "kv": kv, "layer": 0, "page_table": table, "kv_lens": kv_lens}
        arguments |= {"scale": 1.0, "window": None, **changes}
        decode_attention(**arguments)  # type: ignore[arg-type]

    for field, value in (
        ("kv_lens", kv_lens[:1]),
        ("kv_lens", kv_lens.long()),
        ("page_table", table.long()),
        ("page_table", table[:1]),
        ("kv", kv.transpose(4, 5)[..., :2, :, :]),
        ("q", q[..., ::2]),
        ("window", 0),
    ):
        with pytest.raises(ValueError, match=r"kv_lens|page_table|kv has|heads have|window"):
            decode(**{field: value})
    groups = torch.zeros(1, 2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="groups"):
        shared_prefix_attention(q, kv, 0, table, kv_lens, groups, 1.0, None)
    plan = plan_decode(kv_lens, kv, 4, None)
    with pytest.raises(ValueError, match="without groups"):
        shared_prefix_attention(q, kv, 0, table, kv_lens, groups, 1.0, None, plan)
    with pytest.raises(ValueError, match="not for 1 rows"):
        decode_attention(q[:1], kv, 0, table[:1], kv_lens[:1], 1.0, None, plan)


@pytest.mark.parametrize("window", [None, 290])
def test_many_parts_are_put_together_in_two_stages(
    make_kv: MakeKV, device: torch.device, use_launches: UseLaunches, window: int | None
) -> None:
    use_launches(decode_attention=launch.LaunchConfig(block_n=16, splits=90))
    lens = [5, 16 * 20 + 3]
    q, kv, table, contents = make_case(make_kv, device, lens, 4, window)
    plan = plan_decode(int32(*lens).to(device), kv, 4, window)
    parts = [item[4] for item in plan.items.tolist() if item[0] == 1]
    assert parts == [len(parts)] * len(parts)
    assert len(parts) > 16
    for _ in range(2):  # the counters are as they were
        out = decode_attention(q, kv, LAYER, table, int32(*lens).to(device), SCALE, window, plan)
        check(out, q, contents, window)
    assert not plan.counters.any()


def test_nothing_to_do(make_kv: MakeKV, device: torch.device) -> None:
    q, kv, table, _ = make_case(make_kv, device, [5], 4)
    out = decode_attention(q[:0], kv, 0, table[:0], int32().to(device), 1.0, None)
    assert out.shape == (0, 4, 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_follows_the_lengths(make_kv: MakeKV, device: torch.device) -> None:
    most = [400, 900, 64, 300]
    q, kv, table, contents = make_case(
        make_kv, device, most, 8, page_tokens=64, head_dim=128, dtype=torch.bfloat16
    )
    kv_lens = int32(*most).to(device)
    decode_attention(q, kv, LAYER, table, kv_lens, SCALE, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, kv, LAYER, table, kv_lens, SCALE, None)
    for lens in ([400, 1, 0, 300], [7, 900, 64, 65], most):
        kv_lens.copy_(int32(*lens))
        graph.replay()
        known = [part[:, :, :n] for part, n in zip(contents, lens, strict=True)]
        check(out, q, known, None)


def test_the_launch_table_knows_the_kernels(device: torch.device) -> None:
    for kernel in ("decode_attention", "shared_prefix_attention"):
        for format in ("half", "float32"):
            config = launch.config(kernel, launch.capability(device), head_dim=64, format=format)
            assert config.block_n >= 16
            assert config.splits >= 1
