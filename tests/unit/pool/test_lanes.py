"""The order of eviction when tenants have quotas."""

from memd.pool.lru import LruEviction
from memd.types import PageId


def filled(lanes: dict[int, int], partial: tuple[int, ...] = ()) -> LruEviction:
    """Pages 0, 1, … used one after the other, each in the lane that is given for it."""
    lru = LruEviction(len(lanes))
    lru.arrange(4, lambda page: lanes[page])
    for page in lanes:
        lru.add(PageId(page), page in partial, float(page), lanes[page])
    return lru


def test_lanes_are_merged_by_the_time_of_use_and_part_filled_pages_go_first() -> None:
    lru = filled({0: 1, 1: 2, 2: 0, 3: 1, 4: 2, 5: 0}, partial=(3, 4))
    assert lru.in_order() == [3, 4, 0, 1, 2, 5]
    assert lru.coldest(3) == [3, 4, 0]


def test_the_excess_of_a_lane_goes_before_all_others_and_no_page_twice() -> None:
    lru = filled({0: 0, 1: 0, 2: 1, 3: 2, 4: 1, 5: 1})
    assert lru.coldest(6, [(1, 2)]) == [2, 4, 0, 1, 3, 5]
    assert lru.coldest(2, [(2, 9), (1, 9)]) == [3, 2]
    assert lru.coldest(6, [(1, 9), (2, 9)]) == [2, 4, 5, 3, 0, 1]


def test_arranging_anew_keeps_order_and_times() -> None:
    lru = filled({page: page % 4 for page in range(12)}, partial=(1, 6))
    before = lru.in_order()
    lru.arrange(2, lambda page: page % 2)
    assert lru.in_order() == before
    assert [lru.last_used_at(page) for page in before] == [float(page) for page in before]
    lru.discard(PageId(6))
    assert len(lru) == 11
    assert lru.coldest(3, [(1, 1)]) == [1, 0, 2]
