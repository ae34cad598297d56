"""Families and histograms, apart from HTTP."""

import logging
from typing import ClassVar

from http_stand import engine_snapshot
from prometheus_client.parser import text_string_to_metric_families

from memd.config import LIVE_KEYS, Settings
from memd.engine.messages import Histogram, Ready
from memd.observe.families import histogram
from memd.observe.metrics import ENDPOINTS, LENGTH, OUTCOMES, LogCounter, Metrics
from memd.settings import LiveSettings

LIVE = LiveSettings(Settings())


class Source:
    """An engine that has reported once."""

    ready = Ready(1, 100, {}, None, {"page_tokens": 16, "page_bytes": 1024, "block_bytes": 16384})
    snapshot = engine_snapshot()
    snapshot_at = 1000.0
    state = "ready"
    restarts: ClassVar = {"killed": 0, "crashed": 0, "hung": 0}


def families(metrics: Metrics) -> dict:
    text = metrics.render("")[0].decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_histograms_are_summed_up():
    family = histogram("x", "X", ("a",), [(("1",), Histogram([0.1, 1.0], [2, 0, 3], 7.5))])
    assert [(s.name, s.labels.get("le"), s.value) for s in family.samples] == [
        ("x_bucket", "0.1", 2),
        ("x_bucket", "1.0", 2),
        ("x_bucket", "+Inf", 5),
        ("x_count", None, 5),
        ("x_sum", None, 7.5),
    ]


def test_every_family_has_help_and_a_unit_name():
    for name, family in families(Metrics("m", Source(), LIVE)).items():
        assert name.startswith("memd_")
        assert family.documentation
        assert not name.endswith(("_ms", "_mb", "_percent"))


def test_labels_are_bounded_before_any_traffic():
    found = families(Metrics("m", Source(), LIVE))
    assert len(found["memd_requests"].samples) == len(ENDPOINTS) * len(OUTCOMES)
    assert len(found["memd_setting_changes"].samples) == 2 * len(LIVE_KEYS)
    assert sum(len(family.samples) for family in found.values()) < 700


def test_series_before_and_after_the_first_snapshot():
    source = Source()
    source.snapshot, source.ready = None, None
    before, after = families(Metrics("m", source, LIVE)), families(Metrics("m", Source(), LIVE))
    counted = {name for name, family in after.items() if family.type in ("counter", "histogram")}
    assert counted <= set(before)
    assert set(before) < set(after)
    assert "memd_pool_pages" not in before


def test_bytes_follow_from_pages():
    found = families(Metrics("m", Source(), LIVE))
    assert found["memd_pool_limit_bytes"].samples[0].value == 4 * 16384
    assert found["memd_tier_used_bytes"].samples[0].value == 50 * 1024


def test_log_lines_are_counted_by_level():
    metrics = Metrics("m", Source(), LIVE)
    counter = LogCounter(metrics)
    log = logging.Logger("test")
    log.addHandler(counter)
    log.warning("one")
    log.error("two")
    assert metrics.log_messages["warning"] == metrics.log_messages["error"] == 1


def test_lengths_reach_far_enough():
    assert LENGTH[-1] == 262144
