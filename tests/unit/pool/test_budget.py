"""What goes when a budget is full: by hand."""

from typing import get_args

import pytest

from memd.pool.budget import Budget
from memd.types import DropPolicy

BY_SHARE = Budget(pages=10, sink_pages=2, policy="attention_share", page_tokens=4)
OLDEST = Budget(pages=10, sink_pages=2, policy="recency", page_tokens=4)


def test_nothing_goes_while_there_is_room() -> None:
    for budget in (BY_SHARE, OLDEST):
        assert budget.victims(9, 1, [0.1] * 9) == []
        assert budget.victims(0, 10, []) == []


def test_by_recency_the_oldest_behind_the_sinks_go_by_segments() -> None:
    assert OLDEST.segment_pages == 2
    assert OLDEST.victims(10, 1, [0.1] * 10) == [2, 3]
    assert OLDEST.victims(10, 2, []) == [2, 3]


def test_by_share_the_lightest_of_those_between_go() -> None:
    assert BY_SHARE.recent_pages == 4
    shares = [0.0, 0.0, 0.3, 0.1, 0.2, 0.1, 0.0, 0.0, 0.0, 0.0]
    assert BY_SHARE.victims(10, 1, shares) == [3]  # of equals the oldest
    assert BY_SHARE.victims(10, 2, shares) == [3, 5]
    assert BY_SHARE.victims(10, 1, shares[:4]) == [3]  # of those whose share is known
    assert BY_SHARE.victims(10, 1, []) == [2, 3]  # none: as by recency


def test_chunks_end_where_pages_may_have_to_go() -> None:
    assert [OLDEST.chunk_tokens(at) for at in (0, 39, 40, 47, 48, 53)] == [40, 1, 8, 1, 8, 3]


@pytest.mark.parametrize("policy", get_args(DropPolicy))
@pytest.mark.parametrize("sinks", [0, 1, 5])
@pytest.mark.parametrize("more", range(2, 12))
def test_what_goes_makes_room_and_spares_both_ends(
    policy: DropPolicy, sinks: int, more: int
) -> None:
    budget = Budget(sinks + more, sinks, policy, 16)
    for wanted in range(1, budget.segment_pages + 1):
        for known in (0, budget.pages // 2, budget.pages):
            victims = budget.victims(budget.pages, wanted, [0.5] * known)
            assert len(victims) >= wanted
            assert victims == sorted(set(victims))
            assert victims[0] >= sinks
            assert victims[-1] < budget.pages - budget.recent_pages


def test_a_budget_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no room beside 2 .* needs 16 tokens or more"):
        Budget(3, 2, "recency", 4)
