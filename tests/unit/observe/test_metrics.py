"""Families and histograms, apart from HTTP."""

import logging
from typing import get_args

import msgspec
from every_metric import LAYOUT, Source
from prometheus_client.parser import text_string_to_metric_families

from memd.config import LIVE_KEYS, Settings, build
from memd.engine.snapshot_types import Histogram
from memd.histogram import LENGTH, TRANSFER
from memd.observe.catalog.requests import ENDPOINTS, OUTCOMES
from memd.observe.families import histogram
from memd.observe.metrics import LogCounter, Metrics
from memd.settings import LiveSettings
from memd.settings_history import Outcome
from memd.settings_history import Source as Kind

LIVE = LiveSettings(Settings())


def families(metrics: Metrics) -> dict:
    text = metrics.render("")[0].decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_histograms_are_summed_up():
    counts = [2, 0, 3] + [0] * (len(TRANSFER) - 2)
    family = histogram("memd_transfer_seconds", [(("d2h",), Histogram([*TRANSFER], counts, 7.5))])
    found = [(s.labels.get("le"), s.value) for s in family.samples]
    assert found[:4] == [("0.0005", 2), ("0.001", 2), ("0.002", 5), ("0.005", 5)]
    assert found[-3:] == [("+Inf", 5), (None, 5), (None, 7.5)]


def test_labels_are_bounded_before_any_traffic():
    found = families(Metrics("m", Source(), LIVE))
    assert len(found["memd_requests"].samples) == len(ENDPOINTS) * len(OUTCOMES)
    sources, outcomes = get_args(Kind), get_args(Outcome)
    changes = len(found["memd_setting_changes"].samples)
    assert changes == len(sources) * len(outcomes) * len(LIVE_KEYS)
    assert sum(len(family.samples) for family in found.values()) < 700 + changes


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


def test_waste_and_steps_and_what_eviction_cannot_take():
    source = Source()
    pool = msgspec.structs.replace(
        source.snapshot.pool, pinned_pages=2, tail_waste_bytes=640, quarantined_pages=1
    )
    source.snapshot = msgspec.structs.replace(source.snapshot, pool=pool)
    found = values(Metrics("m", source, LIVE))
    assert found["memd_pool_waste_bytes", "0", "tail"] == 640
    assert found["memd_pool_waste_bytes", "0", "block"] == 3 * LAYOUT["block_waste_bytes"]
    assert found["memd_engine_steps_total", "m", "decode", "replayed"] == 3
    assert found["memd_engine_shared_prefix_steps_total", "m"] == 2
    assert found["memd_engine_steps_total", "m", "decode", "eager"] == 1
    assert found["memd_pool_active_ratio", "0"] == (10 + 2 + 1) / 64


def test_c114_tenants_that_are_not_in_the_settings_are_counted_together():
    found = values(Metrics("m", Source(), LIVE))
    tenants = {key[1:]: value for key, value in found.items() if key[0] == "memd_tenant_used_pages"}
    assert tenants == {("other",): 3, ("acme",): 5}
    assert found["memd_tenant_computed_tokens_total", "other"] == 10
    assert found["memd_tenant_quota_pages", "acme"] == 8
    assert ("memd_tenant_quota_pages", "other") not in found
    assert found["memd_tenant_sequences", "other", "waiting"] == 2


def test_values_of_settings_are_those_in_force():
    source, live = Source(), LiveSettings(build({"engine.max_waiting": 7}))
    metrics = Metrics("m", source, live)
    found = values(metrics)
    assert found["memd_setting", "memory.watermark.high"] == 0.9
    assert found["memd_setting", "engine.max_waiting"] == 7
    assert ("memd_setting", "engine.max_batch_tokens") not in found  # "auto", not yet reported
    in_force = {"memory.watermark.high": 0.8, "engine.max_batch_tokens": 512.0}
    source.snapshot = msgspec.structs.replace(source.snapshot, settings=in_force)
    found = values(metrics)
    assert found["memd_setting", "memory.watermark.high"] == 0.8
    assert found["memd_setting", "engine.max_batch_tokens"] == 512


def values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """By name and label values."""
    return {(each.name, *each.labels.values()): each.value for each in metrics.samples()}
