"""What `memd trace show` says of a trace, against counting by hand."""

import random

import pytest

from memd.simulate.trace import TraceHeader, TracePool, TraceRequest, whole_pages
from memd.simulate.trace_summary import ReuseDistances, summarise

POOL = TracePool(page_tokens=10, page_bytes=100, block_bytes=1000, capacity_pages=8)
HEADER = TraceHeader("t", 0.0, None, "digest", {"name": "m"}, POOL, {}, dropped=2)


def request(arrival: float, pages: str, prompt: int, output: int = 0, group: str = "a"):
    assert len(pages) == whole_pages(prompt, output, 10)
    names = (group * 16, "0" * 16, "")
    length = (prompt, output, 50, "stop", 1.0)
    return TraceRequest(arrival, *names, 0, *length, pages=tuple(pages), cached_tokens=prompt // 2)


def test_figures_of_a_small_trace():
    requests = [
        request(1.0, "abc", 25, 6, "1"),
        request(2.0, "abcd", 45, group="2"),  # the third page is half prompt, half output before
        request(2.0, "ab", 20, group="2"),  # its last token is computed in any case
        request(5.0, "x", 12, group="3"),
    ]
    found = summarise(HEADER, requests)
    assert (found["requests"], found["sequences"], found["dropped"]) == (3, 4, 2)
    assert found["span_seconds"] == 4.0
    assert found["arrivals_per_second"] == 0.5
    assert found["infinite_cache_hit_share"] == (30 + 19) / 102
    assert found["cached_share"] == (12 + 22 + 10 + 6) / 102
    assert found["prompt_tokens"] == {
        "least": 12, "p10": 12, "p50": 25, "p90": 45, "p99": 45, "most": 45,
    }  # fmt: skip
    assert found["different_pages"] == 5
    # Between two uses of a: b, c; of a again: b, c, d.
    assert found["reuse_distance_pages"]["least"] == 2
    assert found["reuse_distance_pages"]["most"] == 3
    assert found["reuse_distance_bytes"]["most"] == 300


def test_a_trace_of_nothing_has_no_figures():
    found = summarise(HEADER, [])
    assert found["sequences"] == 0
    for name in ("span_seconds", "arrivals_per_second", "infinite_cache_hit_share", "cached_share"):
        assert found[name] is None
    assert found["prompt_tokens"]["p50"] is None
    assert found["reuse_distance_bytes"]["p50"] is None


@pytest.mark.parametrize("seed", range(5))
def test_reuse_distances_are_what_an_lru_list_says(seed):
    chance = random.Random(seed)
    reuse, recent, expected = ReuseDistances(), [], []
    for _ in range(400):
        page = chance.choice("abcdefghijklmnopqrstuvwxyz"[: chance.randint(1, 26)])
        counts = chance.random() < 0.7
        if page in recent:
            if counts:
                expected.append(len(recent) - 1 - recent.index(page))
            recent.remove(page)
        recent.append(page)
        reuse.use(page, counts)
    assert reuse.distances == expected
    assert reuse.different == len(recent)
