"""Metrics of packed pages: how many there are, what they save and what they lose."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from memd.engine.snapshot_types import EngineSnapshot, PackingSnapshot
from memd.observe.families import by_label, counter, gauge
from memd.observe.pool_metrics import GPU


def packing_metrics(snapshot: EngineSnapshot | None) -> Iterator[Metric]:
    """All families of packed pages.

    Args:
        snapshot: As last reported; None: counters are at zero, gauges absent.
    """
    packing = snapshot.packing if snapshot else None
    if snapshot is not None:
        yield gauge("memd_pool_packed_pages", [((GPU,), snapshot.pool.packed_pages)])
        yield gauge("memd_pool_packed_blocks", [((GPU,), snapshot.pool.packed_blocks)])
    if packing is not None:
        yield from _gauges(packing)
    due = by_label("memd_packing_pages", packing.due_pages if packing else None, (GPU,))
    yield counter("memd_packing_pages", due)


def _gauges(packing: PackingSnapshot) -> Iterator[Metric]:
    yield gauge("memd_packing_saved_bytes", [((GPU,), packing.saved_bytes)])
    yield gauge("memd_packing_stopped", [((GPU,), packing.stopped is not None)])
    errors = {
        "mean": packing.mean_error,
        "worst": packing.worst_error,
        "limit": packing.most_error,
    }
    known = [((GPU, kind), error) for kind, error in errors.items() if error is not None]
    yield gauge("memd_packing_error_ratio", known)
