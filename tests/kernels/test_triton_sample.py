"""Sampling in Triton draws the tokens that the reference draws."""

import pytest
import torch
from memd_kernels import reference
from memd_kernels.launch import LaunchConfig
from torch import Tensor

from .conftest import UseLaunches

pytest.importorskip("triton")

from memd_kernels.triton.sample import argmax, sample

VOCAB = 700


@pytest.fixture
def long_buffer(use_launches: UseLaunches) -> None:
    """Chunks of 512 tokens; any number of the likeliest ones fits."""
    use_launches(sample_scan=LaunchConfig(block_n=512), sample=LaunchConfig(block_n=1024))


@pytest.fixture
def short_buffer(use_launches: UseLaunches) -> None:
    """Chunks of 512 tokens; a tenth of the vocabulary fits."""
    use_launches(sample_scan=LaunchConfig(block_n=512), sample=LaunchConfig(block_n=64))


def arguments(settings: list[dict[str, float]], device: torch.device) -> list[Tensor]:
    """Seeds, positions and settings, a row for each."""
    rows = len(settings)
    values = {
        name: [row.get(name, off) for row in settings]
        for name, off in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }
    return [
        torch.arange(rows, device=device) - 3,
        torch.arange(rows, device=device) * 1000,
        torch.tensor(values["temperature"], device=device),
        torch.tensor(values["top_k"], dtype=torch.int64, device=device),
        torch.tensor(values["top_p"], device=device),
        torch.tensor(values["min_p"], device=device),
    ]


SETTINGS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.2},
    {"temperature": 1e-30},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 300},
    {"top_k": VOCAB},
    {"top_k": -1, "top_p": 1.5},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"top_p": 0.9, "min_p": 0.3},
    {"top_p": 0.9, "min_p": 2.0},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
    {"top_k": 600, "top_p": 0.999, "temperature": 5.0},
]


FLAT: list[dict[str, float]] = [
    {"top_p": 0.9},
    {"top_p": 0.99, "temperature": 1.5},
    {"top_k": 1300},
    {"top_k": 2500, "top_p": 0.8, "min_p": 1e-4},
]


BEYOND_THE_BUFFER = [SETTINGS[row] for row in (8, 13, 17)]


def check_draws(logits: Tensor, settings: list[dict[str, float]], device: torch.device) -> None:
    """Compare with the reference, on the CPU, to the token."""
    expected, _ = reference.sample(logits, *arguments(settings, torch.device("cpu")))
    tokens, failed = sample(logits.to(device), *arguments(settings, device))
    assert tokens.tolist() == expected.tolist()
    assert not failed.any()


def random_logits(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(2)) * 2


@pytest.mark.usefixtures("long_buffer")
@pytest.mark.parametrize("kind", ["normal", "tied", "masked"])
def test_draws_are_those_of_the_reference(device: torch.device, kind: str) -> None:
    settings = SETTINGS if kind == "normal" else [SETTINGS[row] for row in (0, 1, 7, 13, 16)]
    logits = random_logits(len(settings))
    if kind == "tied":
        logits = logits.mul_(2).round_().div_(2)
    if kind == "masked":
        logits[:, ::3] = -torch.inf
    check_draws(logits, settings, device)


@pytest.mark.usefixtures("short_buffer")
def test_draws_within_a_short_buffer(device: torch.device) -> None:
    sharp = [SETTINGS[row] for row in (1, 4, 7, 12, 14, 16)]
    check_draws(random_logits(len(sharp)) * 3, sharp, device)


@pytest.mark.usefixtures("short_buffer")
def test_draws_beyond_the_buffer(device: torch.device) -> None:
    logits = random_logits(len(BEYOND_THE_BUFFER)).mul_(2).round_().div_(2)
    check_draws(logits, BEYOND_THE_BUFFER, device)


@pytest.mark.usefixtures("long_buffer")
@pytest.mark.parametrize("kind", ["normal", "lumps", "peak", "equal"])
def test_flat_rows_are_searched_in_windows(device: torch.device, kind: str) -> None:
    """Far more tokens are kept than the buffer holds."""
    settings = FLAT if kind == "normal" else FLAT[1::2]
    logits = torch.randn(len(settings), 3001, generator=torch.Generator().manual_seed(3))
    if kind == "lumps":
        logits = logits.mul_(5).round_().div_(5)
    if kind == "peak":
        logits[:, 2345] += 9
    if kind == "equal":
        logits[:] = 2.0
    check_draws(logits, settings, device)


@pytest.mark.usefixtures("long_buffer")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_drawn_from_as_in_float32(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Rounded as they are: the largest of many equal ones, and ranks among them, as before."""
    settings = [SETTINGS[row] for row in (0, 1, 4, 7, 13, 16)]
    logits = random_logits(len(settings)).to(dtype)
    check_draws(logits, settings, device)
    wide, given = logits.float().to(device), arguments(settings, device)
    for half, full in (
        (sample(logits.to(device), *given), sample(wide, *given)),
        (argmax(logits.to(device)), argmax(wide)),
    ):
        assert all(torch.equal(*pair) for pair in zip(half, full, strict=True))


@pytest.mark.usefixtures("long_buffer")
def test_what_a_row_draws_does_not_depend_on_the_batch(device: torch.device) -> None:
    settings = [SETTINGS[row] for row in (0, 1, 8, 13)]
    logits = torch.randn(4, VOCAB, device=device)
    given = arguments(settings, device)
    together, _ = sample(logits, *given)
    for row in range(4):
        own = slice(row, row + 1)
        alone, _ = sample(logits[own], *(part[own] for part in given))
        assert alone.item() == together[row].item()


@pytest.mark.usefixtures("long_buffer")
def test_broken_rows_are_reported_and_leave_others_alone(device: torch.device) -> None:
    settings: list[dict[str, float]] = [{}, {"top_p": 0.9}, {"temperature": 0.0}, {"top_k": 4}]
    logits = torch.randn(4, VOCAB, device=device)
    given = arguments(settings, device)
    whole, _ = sample(logits, *given)
    best = logits.argmax(-1)
    for broken, value in ((1, torch.nan), (0, torch.inf), (3, None)):
        spoilt = logits.clone()
        if value is None:
            spoilt[broken] = -torch.inf
        else:
            spoilt[broken, 300] = value
        kept = [row for row in range(4) if row != broken]
        for (tokens, failed), clean in ((sample(spoilt, *given), whole), (argmax(spoilt), best)):
            assert failed.tolist() == [row == broken for row in range(4)]
            assert tokens[kept].tolist() == clean[kept].tolist()
            assert 0 <= tokens[broken] < VOCAB
        assert reference.argmax(spoilt)[1].tolist() == failed.tolist()


def test_argmax_takes_the_lowest_of_equal_ids(device: torch.device) -> None:
    logits = torch.randn(3, 3000, device=device)
    logits[0, [7, 2500]] = logits[1, [1030, 1031]] = 9.0
    logits[2, -1] = 9.0
    tokens, failed = argmax(logits)
    assert tokens.tolist() == [7, 1030, 2999]
    assert not failed.any()


def test_no_rows(device: torch.device) -> None:
    logits = torch.zeros(0, 10, device=device)
    for tokens, failed in (argmax(logits), sample(logits, *arguments([], device))):
        assert tokens.shape == failed.shape == (0,)
