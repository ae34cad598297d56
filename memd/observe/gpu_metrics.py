"""Metrics of the GPU, from what was read last."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from memd.observe.families import counter, gauge
from memd.observe.gpu import GpuReader, GpuState
from memd.observe.pool_metrics import GPU


def gpu_metrics(reader: GpuReader | None) -> Iterator[Metric]:
    """All families of the GPU; what NVML does not tell is absent."""
    yield counter("memd_gpu_poll_failures", [((GPU,), reader.failures if reader else 0)])
    state = reader.state if reader is not None else None
    if reader is None or state is None:
        return
    yield from _board(state)
    yield from _values(state)
    yield from _totals(reader, state)


def _board(state: GpuState) -> Iterator[Metric]:
    board = state.board
    labels = (GPU, board.uuid, board.name, board.driver, board.index)
    yield gauge("memd_gpu_info", [(labels, 1)])
    owners = state.memory.bytes_of
    yield gauge("memd_gpu_memory_bytes", [((GPU, key), value) for key, value in owners.items()])
    yield gauge("memd_gpu_memory_estimated", [((GPU,), state.memory.estimated)])
    yield gauge("memd_gpu_last_poll_timestamp_seconds", [((GPU,), state.reading.at)])


def _values(state: GpuState) -> Iterator[Metric]:
    reading = state.reading
    for name, value in (
        ("utilization_ratio", reading.utilization_ratio),
        ("power_watts", reading.power_watts),
        ("power_limit_watts", reading.power_limit_watts),
    ):
        if value is not None:
            yield gauge(f"memd_gpu_{name}", [((GPU,), value)])
    if reading.temperatures_celsius:
        by_sensor = reading.temperatures_celsius.items()
        yield gauge("memd_gpu_temperature_celsius", [((GPU, key), each) for key, each in by_sensor])


def _totals(reader: GpuReader, state: GpuState) -> Iterator[Metric]:
    reading = state.reading
    if reading.energy_joules is not None:
        yield counter("memd_gpu_energy_joules", [((GPU,), reading.energy_joules)])
    totals: tuple[tuple[str, Mapping[str, float] | None], ...] = (
        ("throttled_seconds", reader.throttled_seconds),
        ("ecc_errors", reading.ecc_errors),
        ("xid_errors", reader.xid_errors),
        ("pcie_bytes", reader.pcie_bytes),
        ("nvlink_bytes", reading.nvlink_bytes),
    )
    for name, values in totals:
        if values:
            yield counter(f"memd_gpu_{name}", [((GPU, key), each) for key, each in values.items()])
