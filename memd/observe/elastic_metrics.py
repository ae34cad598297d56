"""Metrics of the elastic pool: what it takes and gives back, and how pages are moved together."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from memd.engine.snapshot_types import ElasticSnapshot, Histogram
from memd.observe.families import by_label, counter, gauge, histogram
from memd.observe.pool_metrics import GPU, Layout
from memd.observe.registry import FAMILIES


def elastic_metrics(elastic: ElasticSnapshot | None, layout: Layout | None) -> Iterator[Metric]:
    """All families of the elastic pool.

    Args:
        elastic: As last reported; None: counters are at zero, gauges absent.
        layout: `Ready.pool`; None: what follows from it is absent.
    """
    if elastic is not None:
        yield from _gauges(elastic, layout)
    for name, field in (
        ("memd_pool_grown_blocks", "grown_blocks"),
        ("memd_pool_shrunk_blocks", "shrunk_blocks"),
    ):
        values = getattr(elastic, field) if elastic else None
        yield counter(name, by_label(name, values, (GPU,)))
    runs = elastic.defrag_runs if elastic else {}
    yield counter(
        "memd_defrag_runs",
        [
            ((GPU, reason, outcome), runs.get(reason, {}).get(outcome, 0))
            for reason in FAMILIES["memd_defrag_runs"].labels["reason"]
            for outcome in FAMILIES["memd_defrag_runs"].labels["outcome"]
        ],
    )
    pages = elastic.defrag_moved_pages if elastic else 0
    yield counter("memd_defrag_moved_pages", [((GPU,), pages)])
    moved_bytes = elastic.defrag_moved_bytes if elastic else 0
    yield counter("memd_defrag_moved_bytes", [((GPU,), moved_bytes)])
    seconds = Histogram(*elastic.defrag_step_seconds) if elastic else None
    yield histogram("memd_defrag_step_seconds", [((GPU,), seconds)])


def _gauges(elastic: ElasticSnapshot, layout: Layout | None) -> Iterator[Metric]:
    for name, value in (
        ("memd_pool_fragmentation_ratio", elastic.fragmentation_ratio),
        ("memd_pool_max_fragmentation_ratio", elastic.max_fragmentation_ratio),
        ("memd_pool_empty_blocks", elastic.empty_blocks),
        ("memd_pool_under_pressure", elastic.under_pressure),
        ("memd_device_free_bytes", elastic.device_free_bytes),
    ):
        if value is not None:
            yield gauge(name, [((GPU,), value)])
    if layout is not None:
        per_block = layout["block_bytes"] // layout["page_bytes"]
        blocks = -(-elastic.target_pages // per_block)
        yield gauge("memd_pool_target_bytes", [((GPU,), blocks * layout["block_bytes"])])
