"""Pages a step moves: as many as a tenth of a step has room for."""

import pytest

from memd.pool.move_pace import LEAST_PAGES, LEAST_STEPS, MovePace


def settled(step: float, fixed: float, each: float, most: int = 64) -> tuple[MovePace, list[int]]:
    """A pace after some moves that cost so much, over steps of one length, and what it allowed."""
    pace = MovePace()
    for _ in range(LEAST_STEPS):
        pace.stepped(step)
    allowed = []
    for _ in range(20):
        allowed.append(pace.pages(most))
        pace.moved(allowed[-1], fixed + each * allowed[-1])
        pace.stepped(step + fixed + each * allowed[-1])
    return pace, allowed


def test_the_first_are_few_and_more_follow_where_steps_are_long() -> None:
    _, allowed = settled(step=10e-3, fixed=1e-4, each=1e-5)
    assert allowed[0] == LEAST_PAGES
    assert allowed == sorted(allowed)
    assert allowed[-1] == 64


def test_moves_take_a_tenth_of_a_step() -> None:
    _, allowed = settled(step=2e-3, fixed=5e-5, each=1e-5)
    assert 5e-5 + 1e-5 * allowed[-1] == pytest.approx(2e-4, rel=0.15)
    assert max(allowed) <= 1.3 * allowed[-1]


def test_where_a_launch_alone_is_longer_few_go_at_a_time() -> None:
    _, allowed = settled(step=5e-4, fixed=3e-4, each=1e-5)
    assert set(allowed) == {LEAST_PAGES}


def test_one_slow_move_is_forgotten() -> None:
    pace, _ = settled(step=10e-3, fixed=1e-4, each=1e-5)
    pace.moved(64, 1.0)
    assert pace.pages(64) == LEAST_PAGES
    for _ in range(10):
        pace.moved(pace.pages(64), 1e-4)
    assert pace.pages(64) == 64


def test_moves_that_take_no_time_are_no_reason_to_stop() -> None:
    """A coarse clock says so."""
    pace, _ = settled(step=10e-3, fixed=0.0, each=0.0)
    assert pace.pages(64) == 64


def test_before_steps_are_known_the_setting_counts() -> None:
    pace = MovePace()
    pace.stepped(1e-3)
    pace.moved(50, 1.0)
    assert pace.pages(64) == 64
