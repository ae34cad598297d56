"""Which pages of a sequence are packed."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from memd.pool.packing import PackingSchedule, packing_step_tokens

schedules = st.builds(
    PackingSchedule,
    page_tokens=st.sampled_from([1, 16, 24, 64, 128]),
    full_precision_tokens=st.integers(0, 600),
    recent_tokens=st.integers(0, 600),
)


def test_a_long_sequence_is_packed_between_its_ends() -> None:
    schedule = PackingSchedule(64, 128, 128)
    assert schedule.packed_pages(8192) == range(2, 126)
    assert schedule.packed_pages(8192 + 63) == range(2, 126)
    assert schedule.packed_pages(8192 + 64) == range(2, 127)


def test_a_short_sequence_stays_full() -> None:
    schedule = PackingSchedule(64, 128, 128)
    assert not schedule.packed_pages(0)
    assert not schedule.packed_pages(319)
    assert schedule.packed_pages(320) == range(2, 3)


def test_a_part_of_a_page_keeps_the_whole_page_full() -> None:
    assert PackingSchedule(64, 65, 1).packed_pages(1024) == range(2, 15)
    assert PackingSchedule(16, 1, 17).packed_pages(1024) == range(1, 62)


@given(schedule=schedules, num_tokens=st.integers(0, 5000))
def test_first_and_recent_tokens_are_full(schedule: PackingSchedule, num_tokens: int) -> None:
    packed, page = schedule.packed_pages(num_tokens), schedule.page_tokens
    if packed:
        assert packed.start * page >= schedule.full_precision_tokens
        recent = num_tokens - packed.stop * page
        step = packing_step_tokens(page)
        assert schedule.recent_tokens <= recent < schedule.recent_tokens + page + step


@given(schedule=schedules, num_tokens=st.integers(0, 5000))
def test_c063_what_a_token_sees_changes_at_steps_only(
    schedule: PackingSchedule, num_tokens: int
) -> None:
    step = packing_step_tokens(schedule.page_tokens)
    assert step % schedule.page_tokens == 0
    assert 64 <= step < 64 + schedule.page_tokens
    begin = num_tokens // step * step
    assert schedule.packed_pages(num_tokens) == schedule.packed_pages(begin)


@given(schedule=schedules, shorter=st.integers(0, 5000), more=st.integers(0, 500))
def test_a_packed_page_stays_packed(schedule: PackingSchedule, shorter: int, more: int) -> None:
    before, after = schedule.packed_pages(shorter), schedule.packed_pages(shorter + more)
    assert set(before) <= set(after)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 128, 128), "page_tokens is 0, must be 1 or more"),
        ((64, -1, 128), "full_precision_tokens is -1, must be 0 or more"),
        ((64, 128, -5), "recent_tokens is -5, must be 0 or more"),
    ],
)
def test_numbers_below_their_least(numbers: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackingSchedule(*numbers)
