"""What packing loses: means, the worst, and the head that is judged."""

import math

import pytest
import torch

from memd.engine.packing_errors import WINDOW_PACKINGS, PackingErrors


def losses(pages: int, value: float, heads: int = 2) -> torch.Tensor:
    """[pages, 1 layer, heads, 2], all the same."""
    return torch.full((pages, 1, heads, 2), value)


def test_nothing_is_known_before_a_page_is_packed() -> None:
    errors = PackingErrors()
    errors.collect()
    assert (errors.pages, errors.mean, errors.recent) == (0, None, None)


def test_the_mean_is_over_pages_and_not_over_packings() -> None:
    errors = PackingErrors()
    errors.add(losses(3, 0.01))
    errors.collect()
    errors.add(losses(1, 0.05))
    errors.add(losses(4, 0.02))
    errors.collect()
    assert errors.pages == 8
    assert errors.mean == pytest.approx((3 * 0.01 + 0.05 + 4 * 0.02) / 8)
    assert errors.worst == pytest.approx(0.05)


def test_the_head_that_loses_most_is_judged_and_only_after_several_packings() -> None:
    errors = PackingErrors()
    lossy = losses(2, 0.01)
    lossy[0, 0, 1, 0] = 0.5
    for _ in range(WINDOW_PACKINGS - 1):
        errors.add(lossy)
    errors.collect()
    assert errors.recent is None
    errors.add(lossy)
    errors.collect()
    assert errors.recent == pytest.approx((0.5 + 0.01) / 2)
    for _ in range(WINDOW_PACKINGS):
        errors.add(losses(1, 0.02))
    errors.collect()
    assert errors.recent == pytest.approx(0.02), "what was before is forgotten"
    assert errors.worst == 0.5


@pytest.mark.parametrize("value", [math.inf, 7.0])
def test_a_page_that_holds_no_number_counts_as_lost(value: float) -> None:
    errors = PackingErrors()
    errors.add(torch.cat((losses(1, value), losses(1, 0.0))))
    errors.collect()
    assert errors.worst == 1.0
    assert errors.mean == 0.5
