"""Background reclaim between the marks."""

import pytest

from memd.pool.watermarks import Watermarks


def test_starts_at_high_and_stops_at_low() -> None:
    marks = Watermarks(0.9, 0.7)
    assert marks.excess_pages(89, 100, 50) == 0
    assert marks.excess_pages(90, 100, 50) == 20
    assert marks.excess_pages(75, 100, 50) == 5
    assert marks.excess_pages(70, 100, 50) == 0
    assert marks.excess_pages(89, 100, 50) == 0


def test_rests_when_nothing_can_be_evicted() -> None:
    """A mark that cannot be reached does not keep the worker busy (case C020)."""
    marks = Watermarks(0.9, 0.01)
    assert marks.excess_pages(95, 100, 3) == 3
    assert marks.excess_pages(92, 100, 0) == 0
    assert not marks.reclaiming


def test_new_marks_decide_at_once() -> None:
    marks = Watermarks(0.9, 0.7)
    assert marks.excess_pages(85, 100, 50) == 0
    marks.high, marks.low = 0.6, 0.4
    assert marks.excess_pages(85, 100, 50) == 45


def test_crossings_and_time_above() -> None:
    marks = Watermarks(0.9, 0.7)
    for occupied, now in ((10, 0.0), (95, 1.0), (95, 3.0), (80, 4.0), (10, 6.0)):
        marks.observe(occupied, 100, now)
    assert marks.crossings == {"high.up": 1, "high.down": 1, "low.up": 1, "low.down": 1}
    assert marks.above_seconds["high"] == pytest.approx(3.0)
    assert marks.above_seconds["low"] == pytest.approx(5.0)


def test_a_clock_that_steps_back_counts_nothing() -> None:
    marks = Watermarks(0.9, 0.7)
    for now in (100.0, 50.0, 60.0):
        marks.observe(95, 100, now)
    assert marks.above_seconds["high"] == pytest.approx(10.0)
