"""Numbers as people read them."""

import math
from datetime import UTC

import pytest
from memd_dashboard import show


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (show.share, 0.714, "71.4 %"),
        (show.share, 1.0, "100 %"),
        (show.share, 0.55, "55 %"),
        (show.share, None, "—"),
        (show.share, math.nan, "—"),
        (show.duration, 0.00042, "0.42 ms"),
        (show.duration, 0.0124, "12 ms"),
        (show.duration, 1.44, "1.4 s"),
        (show.duration, 59.97, "1 min"),
        (show.duration, 7500.0, "2 h 5 min"),
        (show.duration, 200_000.0, "2 d 7 h"),
        (show.duration, None, "—"),
        (show.count, 0, "0"),
        (show.count, 4.25, "4.2"),
        (show.count, 12_345, "12,345"),
        (show.count, 1_234_567, "1.23 M"),
        (show.count, None, "—"),
        (show.size, 16 * 2**20, "16.0 MiB"),
        (show.size, None, "—"),
    ],
)
def test_a_number_has_its_unit_and_unknown_is_no_zero(function, value, text):
    assert function(value) == text


def test_times_are_told_in_the_zone_of_the_viewer():
    assert show.clock(1_700_000_000.0, UTC) == "22:13:20"
    assert show.date(1_700_000_000.0, UTC) == "14 Nov 22:13:20"
    assert show.ago(100.0, 100.5) == "just now"
    assert show.ago(100.0, 190.0) == "2 min ago"
    assert show.ago(None, 190.0) == "—"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.9, "share of one", "90 %"),
        (8 * 10**9, "bytes", "7.5 GiB"),
        (0, "bytes", "none"),
        (2.0, "seconds", "2.0 s"),
        (5, "steps", "5 steps"),
        ("auto", "tokens", "auto"),
        (True, None, "yes"),
        (None, "bytes", "none"),
    ],
)
def test_a_setting_is_told_with_its_unit(value, unit, text):
    assert show.setting(value, unit) == text
