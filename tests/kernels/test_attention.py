"""Paged attention against a plain softmax in float64, over NaN-filled memory and shuffled pages."""

import pytest
import torch
from memd_kernels.reference import decode_attention, plan_decode, prefill_attention
from torch import Tensor

from .conftest import MakeKV

LAYER = 1
SCALE = 0.3


def fill(kv: Tensor, lens: list[int], seen: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Give sequences random pages; write tokens from `seen` on. Returns page table and contents.

    Contents are [2, num_kv_heads, tokens, head_dim] for each sequence.
    """
    generator = torch.Generator().manual_seed(len(lens))
    page_tokens = kv.shape[5]
    counts = [-(-length // page_tokens) for length in lens]
    free = torch.randperm(kv.shape[0] * kv.shape[1], generator=generator).tolist()
    table = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
    contents = []
    for row, (length, first) in enumerate(zip(lens, seen, strict=True)):
        pages = [free.pop() for _ in range(counts[row])]
        table[row, : len(pages)] = torch.tensor(pages)
        shape = (2, kv.shape[4], length, kv.shape[6])
        content = torch.randn(shape, generator=generator, dtype=torch.float64).to(kv.dtype)
        for token in range(first, length):
            block, page = divmod(pages[token // page_tokens], kv.shape[1])
            kv[block, page, LAYER, :, :, token % page_tokens] = content[:, :, token]
        contents.append(content)
    return table, contents


def naive(q: Tensor, content: Tensor, window: int | None) -> Tensor:
    """Attention of the last tokens of one sequence, [n, heads, dim], in float64."""
    rows, heads = q.shape[:2]
    keys, values = content.double().repeat_interleave(heads // content.shape[1], 1)
    scores = torch.einsum("nhd,hkd->hnk", q.double(), keys) * SCALE
    at = torch.arange(keys.shape[1] - rows, keys.shape[1])[:, None]
    key_at = torch.arange(keys.shape[1])
    hidden = (key_at > at) | (key_at <= at - (window or 10**9))
    return torch.einsum("hnk,hkd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def first_seen(length: int, rows: int, window: int | None) -> int:
    return 0 if window is None else max(0, length - rows + 1 - window)


@pytest.mark.parametrize("window", [None, 1, 4, 6])
@pytest.mark.parametrize("waste", [0, 7, 130])
@pytest.mark.parametrize("heads", [2, 6])
def test_decode(make_kv: MakeKV, window: int | None, waste: int, heads: int) -> None:
    kv = make_kv(waste=waste)
    lens = [1, 4, 5, 13, 8]
    table, contents = fill(kv, lens, [first_seen(length, 1, window) for length in lens])
    q = torch.randn(len(lens), heads, 8)
    out = decode_attention(q, kv, LAYER, table, int32(*lens), SCALE, window)
    for row, content in enumerate(contents):
        expected = naive(q[row : row + 1], content, window)
        torch.testing.assert_close(out[row : row + 1].double(), expected, rtol=1e-5, atol=1e-5)
        alone = decode_attention(
            q[row : row + 1], kv, LAYER, table[row : row + 1], int32(lens[row]), SCALE, window
        )
        assert torch.equal(alone, out[row : row + 1])


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lens", [[13, 14, 16], [0, 40, 3, 17, 39]])
def test_one_plan_serves_all_layers(make_kv: MakeKV, window: int | None, lens: list[int]) -> None:
    kv = make_kv(num_blocks=12)
    q = torch.randn(2, len(lens), 4, 8)
    plan = plan_decode(int32(*lens), kv, 4, window)
    table, contents = fill(kv, lens, [first_seen(length, 1, window) for length in lens])
    before = kv.clone()
    # Keys and values of the first layer are swapped: what the plan's scratch holds has to change.
    kv[:, :, 0] = kv[:, :, LAYER].flip(2)
    for layer in (LAYER, 0, LAYER):
        out = decode_attention(q[layer], kv, layer, table, int32(*lens), SCALE, window, plan)
        for row, content in enumerate(contents):
            expected = naive(q[layer, row : row + 1], content if layer else content.flip(0), window)
            expected = expected if lens[row] else torch.zeros_like(expected)
            torch.testing.assert_close(out[row : row + 1].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv[:, :, LAYER], before[:, :, LAYER], equal_nan=True, rtol=0, atol=0)


def test_a_plan_of_other_rows_is_refused(make_kv: MakeKV) -> None:
    kv, table = make_kv(), torch.zeros(2, 3, dtype=torch.int32)
    plan = plan_decode(int32(5, 5, 5), kv, 4, None)
    with pytest.raises(ValueError, match="plan 3 for 2 rows"):
        decode_attention(torch.zeros(2, 4, 8), kv, 0, table, int32(5, 5), 1.0, None, plan)
    plan = plan_decode(int32(5, 50), kv, 4, None)
    with pytest.raises(ValueError, match="page_table holds 3"):
        decode_attention(torch.zeros(2, 4, 8), kv, 0, table, int32(5, 5), 1.0, None, plan)


@pytest.mark.parametrize("window", [None, 1, 4, 6])
@pytest.mark.parametrize("waste", [0, 7, 130])
@pytest.mark.parametrize("heads", [2, 6])
def test_prefill(make_kv: MakeKV, window: int | None, waste: int, heads: int) -> None:
    kv = make_kv(waste=waste)
    lens, rows = [1, 9, 5, 13, 8], [1, 9, 0, 3, 1]
    table, contents = fill(
        kv, lens, [first_seen(n, new, window) for n, new in zip(lens, rows, strict=True)]
    )
    starts = [0, 1, 10, 10, 13, 14]
    q = torch.randn(14, heads, 8)
    out = prefill_attention(q, kv, LAYER, table, int32(*starts), int32(*lens), SCALE, window)
    for row, content in enumerate(contents):
        own = slice(starts[row], starts[row + 1])
        expected = naive(q[own], content, window)
        torch.testing.assert_close(out[own].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40, 300])
def test_prefill_longer_than_a_tile(make_kv: MakeKV, window: int | None) -> None:
    kv = make_kv(num_blocks=20, pages_per_block=3, page_tokens=16)
    length, rows = 700, 650
    table, contents = fill(kv, [length], [first_seen(length, rows, window)])
    q = torch.randn(rows, 4, 8)
    out = prefill_attention(q, kv, LAYER, table, int32(0, rows), int32(length), SCALE, window)
    expected = naive(q, contents[0], window)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_only_its_rounding(make_kv: MakeKV, dtype: torch.dtype) -> None:
    kv = make_kv(dtype=dtype, page_tokens=16)
    lens = [60, 33]
    table, contents = fill(kv, lens, [0, 0])
    q = torch.randn(2, 6, 8).to(dtype)
    decoded = decode_attention(q, kv, LAYER, table, int32(*lens), SCALE, None)
    prefilled = prefill_attention(q, kv, LAYER, table, int32(0, 1, 2), int32(*lens), SCALE, None)
    for row, content in enumerate(contents):
        expected = naive(q[row : row + 1], content, None)
        for out in (decoded, prefilled):
            error = (out[row : row + 1].double() - expected).abs().max()
            assert error < 4 * torch.finfo(dtype).eps * expected.abs().max()


def test_nothing_to_do(make_kv: MakeKV) -> None:
    kv, q = make_kv(), torch.empty(0, 4, 8)
    table = torch.zeros(0, 3, dtype=torch.int32)
    assert decode_attention(q, kv, 0, table, int32(), SCALE, None).shape == q.shape
    assert prefill_attention(q, kv, 0, table, int32(0), int32(), SCALE, None).shape == q.shape


def test_rows_of_padding_are_zeros(make_kv: MakeKV) -> None:
    kv = make_kv()
    lens = [0, 5, 0]
    table, contents = fill(kv, lens, [0, 0, 0])
    q = torch.randn(3, 4, 8)
    decoded = decode_attention(q, kv, LAYER, table, int32(*lens), SCALE, None)
    prefilled = prefill_attention(q, kv, LAYER, table, int32(0, 1, 2, 3), int32(*lens), SCALE, None)
    for out in (decoded, prefilled):
        assert not out[[0, 2]].any()
        expected = naive(q[1:2], contents[1], None)
        torch.testing.assert_close(out[1:2].double(), expected, rtol=1e-5, atol=1e-5)


def test_wrong_arguments_are_refused(make_kv: MakeKV) -> None:
    kv, q = make_kv(), torch.zeros(2, 4, 8)
    table = torch.zeros(2, 3, dtype=torch.int32)

    def decode(**changes: object) -> None:
        arguments = {"q": q, "kv": kv, "layer": 0, "page_table": table, "kv_lens": int32(5, 5)}
        arguments |= {"scale": 1.0, "window": None, **changes}
        decode_attention(**arguments)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="kv has shape"):
        decode(kv=kv[0])
    with pytest.raises(ValueError, match="layer is 2"):
        decode(layer=2)
    with pytest.raises(ValueError, match="heads have shape"):
        decode(q=q[:, :3])
    with pytest.raises(ValueError, match="float64"):
        decode(q=q.double())
    with pytest.raises(ValueError, match="page_table"):
        decode(page_table=table.long())
    with pytest.raises(ValueError, match="kv_lens has 1"):
        decode(kv_lens=int32(5))
    with pytest.raises(ValueError, match="kv_lens is"):
        decode(kv_lens=int32(5, 5).long())
    with pytest.raises(ValueError, match="kv_lens has -1"):
        decode(kv_lens=int32(5, -1))
    with pytest.raises(ValueError, match="up to 4 pages; page_table holds 3"):
        decode(kv_lens=int32(5, 13))
    with pytest.raises(ValueError, match="window is 0"):
        decode(window=0)
    for starts in ([0, 1], [0, 1, 3], [-1, 1, 2]):
        with pytest.raises(ValueError, match="query_starts"):
            prefill_attention(q, kv, 0, table, int32(*starts), int32(5, 5), 1.0, None)
    with pytest.raises(ValueError, match="2 rows to a sequence of 1"):
        prefill_attention(q, kv, 0, table, int32(0, 2, 2), int32(1, 5), 1.0, None)


@pytest.mark.parametrize("waste", [0, 7])
def test_c066_no_page_outside_the_memory_is_read(make_kv: MakeKV, waste: int) -> None:
    kv = make_kv(waste=waste)
    table, contents = fill(kv, [13], [0])
    num_pages, q = kv.shape[0] * kv.shape[1], torch.randn(1, 4, 8)
    too_long = int32(table.shape[1] * kv.shape[5] + 1)

    def both(entries: Tensor, lens: Tensor) -> list[Tensor]:
        arguments = q, kv, LAYER, entries
        return [
            decode_attention(*arguments, lens, SCALE, None),
            prefill_attention(*arguments, int32(0, 1), lens, SCALE, None),
        ]

    with pytest.raises(ValueError, match="page_table holds 5"):
        both(table, too_long)
    for page in (-1, num_pages, 2**30):
        for place in (0, 2, 3):
            wrong = table.clone()
            wrong[0, place] = page
            with pytest.raises(ValueError, match="a page that kv does not have"):
                decode_attention(q, kv, LAYER, wrong, int32(13), SCALE, None)
            with pytest.raises(ValueError, match="a page that kv does not have"):
                prefill_attention(q, kv, LAYER, wrong, int32(0, 1), int32(13), SCALE, None)
    table[0, 4] = -1  # past the sequence's pages: not read
    for out in both(table, int32(13)):
        torch.testing.assert_close(out.double(), naive(q, contents[0], None), rtol=1e-5, atol=1e-5)
