"""The registry against what is scraped, in both directions; its page; its cost."""

import asyncio
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from every_metric import every_metric
from http_stand import engine_snapshot
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from memd.config import Settings
from memd.observe.metrics import Metrics
from memd.observe.reference import metrics_page
from memd.observe.registry import FAMILIES, family_of
from memd.settings import LiveSettings

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def metrics() -> Iterator[Metrics]:
    full = every_metric()
    yield full
    asyncio.run(full.gpu.stop())


@pytest.fixture(scope="module")
def samples(metrics: Metrics) -> list[Sample]:
    return [each for each in metrics.samples() if each.name.startswith("memd_")]


def test_every_family_is_scraped_and_every_scraped_one_declared(metrics: Metrics):
    scraped = {family.name: family for family in metrics.collect()}
    assert set(scraped) == set(FAMILIES)
    for name, family in scraped.items():
        assert (family.type, family.documentation) == (FAMILIES[name].kind, FAMILIES[name].help)


def test_labels_and_their_values_are_those_declared(samples: list[Sample]):
    for sample in samples:
        family = family_of(sample.name)
        labels = [label for label in sample.labels if label != "le"]
        assert labels == list(family.labels), sample.name
        for label, bound in family.labels.items():
            if isinstance(bound, tuple):
                assert sample.labels[label] in bound, sample


def test_every_combination_of_bounded_labels_is_there(samples: list[Sample]):
    found: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for sample in samples:
        family = family_of(sample.name)
        if family.kind != "gauge":
            found[family.name].add(tuple(sample.labels[label] for label in family.labels))
    for name, combinations in found.items():
        bounds = FAMILIES[name].labels.values()
        given = [
            bound if isinstance(bound, tuple) else sorted({each[at] for each in combinations})
            for at, bound in enumerate(bounds)
        ]
        assert combinations == set(product(*given)), name


def test_bucket_bounds_are_those_declared():
    fresh = Metrics("m", every_source(None), LiveSettings(Settings()))
    bounds: dict[str, set[str]] = defaultdict(set)
    for sample in fresh.samples():
        if sample.name.endswith("_bucket"):
            bounds[sample.name.removesuffix("_bucket")].add(sample.labels["le"])
    histograms = {name for name, family in FAMILIES.items() if family.kind == "histogram"}
    assert set(bounds) == histograms - {"memd_job_duration_seconds"}
    for name, found in bounds.items():
        assert found == {*map(str, FAMILIES[name].buckets), "+Inf"}


def every_source(snapshot: object) -> object:
    """An engine that has, or has not, reported."""

    class Source:
        ready = None
        snapshot_at = 0.0
        state = "loading"

    source = Source()
    source.snapshot, source.restarts = snapshot, {}
    return source


def test_c112_what_is_never_absent_is_there_before_the_engine():
    fresh = Metrics("m", every_source(None), LiveSettings(Settings()))
    there = {family.name for family in fresh.collect()}
    apart = {"memd_history_rows", "memd_history_queue_rows"}  # of parts that are built beside this
    apart |= {"memd_job_runs", "memd_job_duration_seconds", "memd_trace_requests"}
    assert {name for name, family in FAMILIES.items() if not family.absent} - there == apart


def test_names_follow_the_rules():
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"memd_[a-z0-9_]+", name)
        assert not re.search(r"_(ms|mb|gb|percent|perc|total)$", name), name
        assert family.help
        assert family.help[0].isupper() or family.help[0] == "1"
        assert not family.help.endswith(".")
        assert "job" not in family.labels
        assert "instance" not in family.labels
        assert bool(family.buckets) == (family.kind == "histogram")
        assert list(family.buckets) == sorted(family.buckets)


def test_c116_a_second_daemon_in_one_process_has_metrics_of_its_own():
    for _ in range(3):
        metrics = Metrics("m", every_source(engine_snapshot()), LiveSettings(Settings()))
        names = [
            (sample.name, *sorted(sample.labels.items()))
            for family in text_string_to_metric_families(metrics.render("")[0].decode())
            for sample in family.samples
        ]
        assert len(names) == len(set(names))
        assert metrics.requests["completions", "ok"] == 0
        metrics.requests["completions", "ok"] += 1


def test_samples_are_what_a_scrape_shows(metrics: Metrics):
    def shown() -> set[tuple[str, frozenset[tuple[str, str]]]]:
        text = metrics.render("")[0].decode()
        return {
            (sample.name, frozenset(sample.labels.items()))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    assert {(each.name, frozenset(each.labels.items())) for each in metrics.samples()} == shown()


def test_samples_take_less_than_five_milliseconds(metrics: Metrics):
    metrics.samples()
    best = 1.0
    for _ in range(10):
        began = time.thread_time()
        metrics.samples()
        best = min(best, time.thread_time() - began)
    assert best < 0.005


def test_the_reference_page_is_what_the_registry_says():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "memd.observe.reference"], capture_output=True, text=True, check=True
    )
    assert run.stdout == metrics_page()
    assert page == metrics_page(), "run: python -m memd.observe.reference > docs/metrics.md"
    for family in FAMILIES.values():
        assert f"| `{family.scraped_name}` | {family.kind} |" in page
