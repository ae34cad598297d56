"""Sampling: what is kept, with which probability, and that each row stands alone."""

import pytest
import torch
from memd_kernels.reference import argmax, sample, token_logprobs, uniform
from torch import Tensor

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def draw_rows(*arguments: Tensor) -> Tensor:
    """Tokens of rows of which none fails."""
    tokens, failed = sample(*arguments)
    assert not failed.any()
    return tokens


def draw(logits: Tensor, seeds: Tensor | None = None, **settings: float) -> Tensor:
    """Sample with one setting for all rows; seeds count up unless given."""
    rows = len(logits)
    values = {**OFF, **settings}
    return draw_rows(
        logits,
        torch.arange(rows) if seeds is None else seeds,
        torch.full((rows,), 7),
        torch.full((rows,), values["temperature"]),
        torch.full((rows,), int(values["top_k"])),
        torch.full((rows,), values["top_p"]),
        torch.full((rows,), values["min_p"]),
    )


def naive_kept(logits: Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Ids that stay, most likely first, one at a time in float64."""
    probabilities = logits.double().softmax(-1)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i].item(), i))
    if 0 < top_k < len(order):
        order = order[:top_k]
    total = float(probabilities[order].sum())
    kept: list[int] = []
    before = 0.0
    for token in order:
        p = float(probabilities[token])
        if kept and (before >= top_p * total or p < min_p * float(probabilities[order[0]])):
            break
        kept.append(token)
        before += p
    return kept


def chi_square_bound(degrees: int) -> float:
    """Four standard deviations above the mean."""
    return degrees + 4 * (2 * degrees) ** 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 8, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
    ],
)
@pytest.mark.parametrize("vary", ["seeds", "positions"])
def test_draws_follow_the_kept_distribution(settings: dict[str, float], vary: str) -> None:
    draws, vocab = 20_000, 24
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    values = {**OFF, **settings}
    counting, fixed = torch.arange(draws), torch.full((draws,), 11)
    seeds, positions = (counting, fixed) if vary == "seeds" else (fixed, counting)
    tokens = draw_rows(
        logits.expand(draws, -1),
        seeds,
        positions,
        torch.full((draws,), values["temperature"]),
        torch.full((draws,), int(values["top_k"])),
        torch.full((draws,), values["top_p"]),
        torch.full((draws,), values["min_p"]),
    )
    scaled = logits / values["temperature"]
    kept = naive_kept(scaled, int(values["top_k"]), values["top_p"], values["min_p"])
    expected = scaled[kept].double().softmax(-1) * draws
    observed = tokens.bincount(minlength=vocab)
    assert observed.sum() == observed[kept].sum()
    statistic = ((observed[kept] - expected) ** 2 / expected).sum()
    assert statistic < chi_square_bound(len(kept) - 1)


def test_a_tail_beyond_the_sorted_head_is_reached() -> None:
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(0)) * 0.1
    tokens = draw(logits, top_p=0.999)
    ranks = (logits > logits.gather(1, tokens[:, None])).sum(-1)
    assert ranks.max() > 4000
    assert 2200 < ranks.double().mean() < 2750


@pytest.mark.parametrize("top_k", [1500, 3000, 5000, 9000])
def test_top_p_is_of_all_that_a_large_top_k_leaves(top_k: int) -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 0.5
    kept = naive_kept(logits, top_k, 0.8, 0.0)
    tokens = draw(logits.expand(400, -1), top_k=top_k, top_p=0.8).tolist()
    ranks = [kept.index(token) for token in tokens]
    assert max(ranks) > 0.95 * len(kept)


def test_head_and_full_sort_agree() -> None:
    # 3,000 equal logits: what lies in the head is not certain, ids decide.
    logits = torch.zeros(50, 4000)
    logits[:, 1000:] = -1.0
    logits[:, 3990] = 1.0
    tokens = draw(logits, top_k=3)
    assert set(tokens.tolist()) == {3990, 0, 1}
    tokens = draw(logits, top_k=1500)
    assert set(tokens.tolist()) <= {3990, *range(1499)}


def test_each_row_stands_alone() -> None:
    rows, vocab = 40, 1500
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, vocab, generator=generator) * 2
    seeds = torch.randint(0, 2**62, (rows,), generator=generator)
    positions = torch.arange(rows)
    temperature = torch.tensor([0.0, 0.7, 1.0, 2.0]).repeat(10)
    top_k = torch.tensor([0, 40, 0, 5, 1]).repeat(8)
    top_p = torch.tensor([1.0, 0.9, 1.0, 0.5, 0.0, 1.0, 0.99, 1.0]).repeat(5)
    min_p = torch.tensor([0.0, 0.05]).repeat(20)
    everything = (logits, seeds, positions, temperature, top_k, top_p, min_p)
    together = draw_rows(*everything)
    shuffled = torch.randperm(rows, generator=generator)
    assert torch.equal(draw_rows(*(part[shuffled] for part in everything)), together[shuffled])
    for row in range(rows):
        alone = draw_rows(*(part[row : row + 1] for part in everything))
        assert alone.item() == together[row].item()


def test_settings_that_mean_greedy() -> None:
    logits = torch.randn(30, 300, generator=torch.Generator().manual_seed(1))
    logits[:, 7] = logits[:, 200] = 9.0
    for settings in (
        {"temperature": 0.0},
        {"top_p": 0.0},
        {"top_p": 1e-9},
        {"top_k": 1},
        {"min_p": 1.0, "top_k": 1},
        {"temperature": 1e-30, "top_k": 1},
    ):
        assert draw(logits, **settings).tolist() == [7] * 30, settings
    assert set(draw(logits, temperature=1e-30).tolist()) == {7, 200}


def test_settings_that_mean_off() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    plain = draw(logits)
    for settings in ({"top_k": 300}, {"top_k": 301}, {"top_k": -1}, {"top_p": 1.5}):
        assert torch.equal(draw(logits, **settings), plain), settings


def test_masked_tokens_never_come_out() -> None:
    logits = torch.zeros(2000, 20)
    logits[:, ::2] = -torch.inf
    for settings in ({}, {"top_p": 0.99}, {"top_k": 15}, {"min_p": 0.01}, {"temperature": 0.0}):
        assert (draw(logits, **settings) % 2 == 1).all(), settings


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, None])
def test_a_broken_row_is_reported_and_leaves_the_others_alone(broken: float | None) -> None:
    logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(1))
    spoilt = logits.clone()
    if broken is None:
        spoilt[1] = -torch.inf
    else:
        spoilt[1, 700] = broken
    seeds = torch.arange(3)
    for temperature, top_p in ((1.0, 1.0), (1.0, 0.9), (0.0, 1.0)):
        settings = torch.full((3,), temperature), seeds * 0, torch.full((3,), top_p), torch.zeros(3)
        clean, _ = sample(logits, seeds, seeds, *settings)
        tokens, failed = sample(spoilt, seeds, seeds, *settings)
        assert failed.tolist() == [False, True, False]
        assert tokens[[0, 2]].tolist() == clean[[0, 2]].tolist()
        assert 0 <= tokens[1] < 2000
    assert argmax(spoilt)[1].tolist() == [False, True, False]


def test_argmax_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, 30)
    logits[0, [9, 4, 20]] = 1.0
    tokens, failed = argmax(logits)
    assert tokens.tolist() == [4, 0]
    assert not failed.any()


def test_uniform_is_splitmix64() -> None:
    def mix(bits: int) -> int:
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        return bits ^ bits >> 31

    seeds = [0, 1, 12345, 2**63 - 1, -1, -(2**63)]
    positions = [0, 1, 9000, 2**40, 3, 8]
    expected = [
        (mix((mix(s % 2**64) + p * 0x9E3779B97F4A7C15) % 2**64) >> 12) * 2.0**-52
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert uniform(torch.tensor(seeds), torch.tensor(positions)).tolist() == expected


def test_uniform_is_even_and_neighbours_are_independent() -> None:
    side, cells = 400, 16
    seeds, positions = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    draws = uniform(seeds.flatten(), positions.flatten()).view(side, side)
    assert draws.min() >= 0
    assert draws.max() < 1
    bins = (draws * cells).long()
    for first, second in (
        (bins[1:], bins[:-1]),
        (bins[:, 1:], bins[:, :-1]),
        (bins[1:, 1:], bins[:-1, :-1]),
        (bins[1:, :-1], bins[:-1, 1:]),
    ):
        observed = (first * cells + second).flatten().bincount(minlength=cells**2).double()
        expected = first.numel() / cells**2
        assert ((observed - expected) ** 2 / expected).sum() < chi_square_bound(cells**2 - 1)


def test_logprobs() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1)) * 3
    ids = torch.tensor([0, 49, 3, 3, 7])
    expected = logits.double().log_softmax(-1)
    chosen, values, top_ids = token_logprobs(logits, ids, 4)
    torch.testing.assert_close(chosen.double(), expected[torch.arange(5), ids], rtol=0, atol=1e-5)
    torch.testing.assert_close(values.double(), expected.topk(4).values, rtol=0, atol=1e-5)
    assert torch.equal(top_ids, expected.topk(4).indices)
    _, values, top_ids = token_logprobs(logits, ids, 0)
    assert values.shape == top_ids.shape == (5, 0)


def test_wrong_arguments_are_refused() -> None:
    logits, ints, floats = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    with pytest.raises(ValueError, match="logits"):
        sample(logits.double(), ints, ints, floats, ints, floats, floats)
    with pytest.raises(ValueError, match="top_p"):
        sample(logits, ints, ints, floats, ints, floats[:1], floats)
    with pytest.raises(ValueError, match="seeds"):
        sample(logits, floats, ints, floats, ints, floats, floats)
    with pytest.raises(ValueError, match="top is 6"):
        token_logprobs(logits, ints, 6)
    with pytest.raises(ValueError, match="token_ids"):
        token_logprobs(logits, ints[:1], 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_uniform_has_the_same_bits_on_cuda() -> None:
    seeds = torch.randint(-(2**63), 2**63 - 1, (10_000,))
    positions = torch.arange(10_000)
    assert torch.equal(uniform(seeds.cuda(), positions.cuda()).cpu(), uniform(seeds, positions))
