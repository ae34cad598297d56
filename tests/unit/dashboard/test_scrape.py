"""Totals, increases and quantiles of scrapes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as some
from memd_dashboard.scrape import Scrape, Window, parse, quantile_of


def scrape(at, **totals):
    return Scrape(at, {name: [({}, value)] for name, value in totals.items()})


def test_only_memd_is_read_and_labels_add_up():
    text = 'memd_a_total{x="1"} 2\nmemd_a_total{x="2"} 3\nprocess_cpu_seconds_total 9\n'
    found = parse(text, 7.0)
    assert found.at == 7.0
    assert found.total("memd_a_total") == 5
    assert found.total("memd_a_total", x="2") == 3
    assert found.total("memd_a_total", x="3") is None
    assert found.total("process_cpu_seconds_total") is None
    assert found.by("memd_a_total", "x") == {"1": 2, "2": 3}


@given(some.lists(some.integers(0, 50), min_size=2, max_size=20), some.data())
def test_an_increase_counts_each_growth_once_over_restarts(growths, data):
    restarts = data.draw(some.sets(some.integers(1, len(growths) - 1)))
    value, true_growth, scrapes = 10, 0, [scrape(0, n=10)]
    for at, growth in enumerate(growths, 1):
        if at in restarts and growth < value:  # it counts from 0 and falls: seen as a restart
            value = growth
        else:
            value += growth
        true_growth += growth
        scrapes.append(scrape(at, n=value))
    assert Window(scrapes, 1000).increase("n") == true_growth


def test_a_window_reaches_back_so_far_and_no_farther():
    window = Window([scrape(at, n=at) for at in range(0, 100, 10)], 30)
    assert window.seconds == 30
    assert window.increase("n") == 30
    assert window.rate("n") == 1.0
    assert window.last("n") == 90


def test_what_is_not_known_is_none():
    empty, one = Window([]), Window([scrape(0, n=1)])
    for window in (empty, one):
        assert window.increase("n") is None
        assert window.rate("n") is None
        assert window.ratio("n", "m") is None
        assert window.quantile(0.5, "h") is None
    assert Window([scrape(0, n=1, m=1), scrape(1, n=2, m=1)]).ratio("n", "m") is None


@pytest.mark.parametrize(
    ("q", "cumulative", "value"),
    [
        (0.5, [(1.0, 10), (2.0, 20), (math.inf, 20)], 1.0),
        (0.75, [(1.0, 10), (2.0, 20), (math.inf, 20)], 1.5),
        (0.95, [(1.0, 10), (math.inf, 20)], 1.0),  # beyond the last bound it is at least that
        (0.5, [(1.0, 0), (math.inf, 0)], None),
        (0.5, [], None),
    ],
)
def test_a_quantile_is_interpolated_as_prometheus_does(q, cumulative, value):
    assert quantile_of(q, cumulative) == value
