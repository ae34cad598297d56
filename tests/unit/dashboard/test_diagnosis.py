"""Findings: each cause is found from its evidence, and nothing is found in health."""

import math

import pytest
from memd_dashboard.scrape import Scrape, Window
from memd_dashboard.view import diagnosis
from memd_dashboard.view.facts import Facts

SETTINGS = {
    "memory.watermark.high": 0.9,
    "memory.watermark.low": 0.7,
    "memory.prefetch.lookahead": 3,
    "memory.regret_window": 60.0,
}
POOL = {"capacity_pages": 1000, "layout": {"page_bytes": 16384, "page_tokens": 16}}


def window(gauges=None, **grown):
    """Two scrapes, ten minutes apart, between which counters grew by so much."""
    first, second = Scrape(0.0, {}), Scrape(600.0, {})
    for name, value in grown.items():
        metric, _, label = name.partition("__")
        labels = dict([label.split("_", 1)]) if label else {}
        first.samples.setdefault(f"memd_{metric}_total", []).append((labels, 0.0))
        second.samples.setdefault(f"memd_{metric}_total", []).append((labels, float(value)))
    for name, value in (gauges or {}).items():
        second.samples[f"memd_{name}"] = [({}, value)]
    return Window([first, second], 600)


def gaps(scrapes, short, long):
    """Gaps between tokens: so many of 10 ms, so many of a second."""
    for scrape, (few, many) in zip(scrapes, ((0, 0), (short, short + long)), strict=True):
        scrape.samples["memd_inter_token_latency_seconds_bucket"] = [
            ({"le": "0.01"}, few),
            ({"le": "1.0"}, many),
            ({"le": "+Inf"}, many),
        ]


def found(pool=None, settings=None, requests=(), prefixes=(), tenants=(), seen=None, **grown):
    facts = Facts(
        {**POOL, **(pool or {})},
        seen or window(**grown),
        {**SETTINGS, **(settings or {})},
        list(requests),
        list(prefixes),
        list(tenants),
    )
    return diagnosis.findings(facts)


def test_nothing_is_found_in_a_full_pool_of_reusable_pages():
    healthy = window(
        {"pool_active_ratio": 0.3, "pool_occupied_ratio": 0.9},
        evicted_pages=5000,
        regretted_pages=20,
        pool_allocations=9000,
        prefix_query_tokens=90_000,
        prefix_hit_tokens=60_000,
    )
    assert found(seen=healthy) == []
    assert found() == []


def test_the_classic_case_a_high_mark_at_95_names_cause_and_new_setting():
    seen = window(
        {"pool_active_ratio": 0.4, "pool_occupied_ratio": 0.95},
        direct_reclaimed_pages=900,
        pool_allocations=4000,
        evicted_pages=4000,
        regretted_pages=10,
    )
    gaps(seen.scrapes, 950, 50)
    (finding,) = found(settings={"memory.watermark.high": 0.95}, seen=seen)
    assert "high mark is too high" in finding.title
    assert "latency peaks" in finding.title
    assert (finding.key, finding.value) == ("memory.watermark.high", "85%")
    assert any("900 pages" in text and "22.5 %" in text for text in finding.evidence)
    assert any("p99" in text for text in finding.evidence)


def test_the_proposed_high_mark_stays_above_the_low_one():
    (finding,) = found(
        settings={"memory.watermark.high": 0.95, "memory.watermark.low": 0.9},
        direct_reclaimed_pages=9,
        pool_allocations=100,
    )
    assert finding.value == "92%"


def test_regret_asks_for_a_larger_host_tier_and_thrash_ranks_higher():
    (some,) = found(pool={"host_capacity_pages": 100}, evicted_pages=1000, regretted_pages=200)
    assert some.key == "memory.host.limit"
    assert "host tier is too small" in some.title
    (most,) = found(evicted_pages=1000, regretted_pages=800)
    assert "thrashes" in most.title
    assert most.severity > some.severity
    assert any("no host tier" in text for text in most.evidence)


def test_requests_that_wait_for_memory_name_the_largest_holder():
    rows = [
        {"id": "big", "state": "running", "pages": 700},
        {"id": "w", "state": "waiting", "waiting_for": "capacity", "age_seconds": 9.0},
    ]
    (finding,) = found(requests=rows, seen=window({"pool_active_ratio": 0.93}))
    assert "wait" in finding.title
    assert any("big" in text for text in finding.evidence)
    assert found(requests=rows, seen=window({"pool_active_ratio": 0.5})) == []


def test_one_tenant_that_fills_the_pool_is_named_only_while_others_wait():
    tenants = [{"name": "red", "used_bytes": 900}, {"name": "blue", "used_bytes": 100}]
    waiting = {"state": "waiting", "waiting_for": "prefix", "tenant": "blue"}
    (finding,) = found(tenants=tenants, requests=[waiting])
    assert finding.title.startswith("Tenant red")
    assert finding.page == "tenants"
    assert found(tenants=tenants) == []
    assert found(tenants=tenants, requests=[{**waiting, "tenant": "red"}]) == []


def test_prompts_that_differ_from_their_first_token_on_are_found():
    prefixes = [{"start_token": 0, "branches": 0} for _ in range(20)]
    seen = window(
        prefix_query_tokens=50_000, prefix_hit_tokens=100, prefix_miss_tokens__reason_cold=49_000
    )
    (finding,) = found(prefixes=prefixes, seen=seen)
    assert "share nothing" in finding.title
    assert finding.page == "prefixes"
    shared = [{"start_token": 0, "branches": 3} for _ in range(20)]
    assert found(prefixes=shared, seen=seen) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pool": {"leaked_pages": 3}}, "leaked"),
        ({"pool": {"quarantined_pages": 50}}, "set aside"),
        ({"transfer_failures": 4}, "fail"),
        ({"engine_restarts": 1}, "restarted"),
        (
            {"prefetched_pages__outcome_used": 50, "prefetched_pages__outcome_late": 50},
            "too late",
        ),
        (
            {"pool": {"active_pages": 500, "cached_pages": 0, "tail_waste_bytes": 4_000_000}},
            "large",
        ),
    ],
)
def test_other_causes_are_found(given, words):
    (finding,) = found(**given)
    assert words in finding.title
    assert finding.evidence
    assert finding.action


def test_marks_that_lie_close_together_are_found():
    seen = window()
    for scrape, ups in zip(seen.scrapes, (0.0, 90.0), strict=True):
        labels = {"level": "high", "direction": "up"}
        scrape.samples["memd_pool_watermark_crossings_total"] = [(labels, ups)]
    (finding,) = found(settings={"memory.watermark.low": 0.88}, seen=seen)
    assert (finding.key, finding.value) == ("memory.watermark.low", "70%")
    assert found(seen=seen) == []


def test_the_worst_comes_first():
    ranked = found(
        pool={"leaked_pages": 3, "quarantined_pages": 50}, evicted_pages=1000, regretted_pages=200
    )
    severities = [finding.severity for finding in ranked]
    assert severities == sorted(severities, reverse=True)
    assert len(ranked) == 3
    assert not any(math.isnan(each) for each in severities)
