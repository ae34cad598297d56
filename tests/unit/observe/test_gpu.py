"""The GPU's telemetry over a scripted NVML, and whose the memory is."""

import asyncio
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from http_stand import engine_snapshot
from hypothesis import given
from hypothesis import strategies as st
from scripted_nvml import GB, NOT_SUPPORTED, UNKNOWN, NvmlError, ScriptedNvml

from memd.engine.messages import GpuFacts, Ready
from memd.observe.gpu import MAX_XIDS, GpuReader
from memd.observe.gpu_memory import BoardMemory, memory_by_owner
from memd.observe.gpu_metrics import gpu_metrics
from memd.observe.nvml import Board, BoardLost

FACTS = GpuFacts("7a", weights_bytes=2 * GB, graphs_bytes=GB, pool_in_allocator=False)
BYTES = st.integers(0, 90 * GB)


class Source:
    """An engine on the scripted board; 16 GB of pool, 4 GB in torch's allocator."""

    def __init__(self, gpu: GpuFacts | None = FACTS) -> None:
        self.ready: Ready | None = Ready(77, 100, {}, None, {}, gpu)
        snapshot = engine_snapshot(committed_bytes=16 * GB)
        self.snapshot: Any = type(snapshot)(
            **{
                **{name: getattr(snapshot, name) for name in snapshot.__struct_fields__},
                "allocator_bytes": 4 * GB,
            }
        )


@pytest.fixture
def start() -> Iterator[Callable[..., GpuReader]]:
    """Starts readers; they end with the test."""
    readers: list[GpuReader] = []

    def make(nvml: Any, source: Source | None = None, **more: Any) -> GpuReader:
        load = nvml if callable(nvml) else lambda: nvml
        reader = GpuReader(source or Source(), 0.02, load, **more)
        readers.append(reader)
        reader.start()
        return reader

    yield make
    for reader in readers:
        asyncio.run(reader.stop())
    assert all(reader.join(5) for reader in readers)


def until(met: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def values(reader: GpuReader) -> dict[tuple[str, ...], float]:
    """Samples by name and label values, without the GPU's number."""
    return {
        (sample.name.removeprefix("memd_gpu_"), *list(sample.labels.values())[1:]): sample.value
        for family in gpu_metrics(reader)
        for sample in family.samples
    }


def test_everything_that_nvml_tells_is_shown(start):
    reader = start(ScriptedNvml(throttle=0x44))
    until(lambda: reader.state)
    found = values(reader)
    assert found["info", "GPU-7a", "NVIDIA Test 80GB", "580.1", "3"] == 1
    assert found["utilization_ratio",] == 0.4
    assert found["temperature_celsius", "core"] == 61
    assert found["temperature_celsius", "memory"] == 70
    assert found["power_watts",] == 350.5
    assert found["power_limit_watts",] == 700
    assert found["energy_joules_total",] == 12
    assert found["ecc_errors_total", "corrected"] == 0
    assert found["nvlink_bytes_total", "receive"] == 8192
    assert found["poll_failures_total",] == 0
    assert reader.problem is None
    until(lambda: values(reader)["throttled_seconds_total", "thermal"] > 0)
    later = values(reader)
    assert later["throttled_seconds_total", "power"] > 0
    assert later["throttled_seconds_total", "hardware"] == 0
    assert later["pcie_bytes_total", "transmit"] > 0
    assert abs(later["last_poll_timestamp_seconds",] - time.time()) < 5


def test_memory_by_owner_sums_to_the_boards_total(start):
    reader = start(ScriptedNvml())
    until(lambda: reader.state)
    owners = {
        key[1]: value / GB for key, value in values(reader).items() if key[0] == "memory_bytes"
    }
    assert owners == {
        "pool": 16,
        "weights": 2,
        "graphs": 1,
        "other_self": 6,  # 25 are listed for the process
        "other_processes": 5,
        "reserved": 1,
        "free": 49,
    }
    assert values(reader)["memory_estimated",] == 0


UNTOLD = {
    "an empty list": [],
    "no use": [SimpleNamespace(pid=77, usedGpuMemory=None)],
    "another pid space": [SimpleNamespace(pid=4096, usedGpuMemory=25 * GB)],
    "fields swapped": [SimpleNamespace(pid=25 * GB, usedGpuMemory=77)],
    "less than is known": [SimpleNamespace(pid=77, usedGpuMemory=GB)],
    "more than is used": [SimpleNamespace(pid=77, usedGpuMemory=79 * GB)],
    "not supported": NvmlError(NOT_SUPPORTED),
    "an error": NvmlError(UNKNOWN),
}


@pytest.mark.parametrize("processes", UNTOLD.values(), ids=UNTOLD.keys())
def test_c134_own_use_comes_from_the_own_allocators(start, processes):
    reader = start(ScriptedNvml(processes=processes))
    until(lambda: reader.state)
    owners = reader.state.memory.bytes_of
    own = {"pool": 16 * GB, "weights": 2 * GB, "graphs": GB, "other_self": GB}
    assert {name: owners[name] for name in own} == own
    assert owners["other_processes"] == 10 * GB
    assert values(reader)["memory_estimated",] == 1


def test_c134_what_is_not_told_is_absent_and_absurd_values_are_dropped(start):
    refused = NvmlError(NOT_SUPPORTED)
    nvml = ScriptedNvml(
        power=refused,
        limit=10**9,
        utilization=SimpleNamespace(gpu=4_000),
        temperature=-1,
        energy=refused,
        ecc=refused,
        throttle=refused,
        pcie=refused,
        fields={82: 0},
        events=refused,
    )
    reader = start(nvml)
    until(lambda: nvml.calls.count("memory") > 3)
    names = {key[0] for key in values(reader)}
    assert names == {
        "poll_failures_total",
        "info",
        "memory_bytes",
        "memory_estimated",
        "last_poll_timestamp_seconds",
        "xid_errors_total",
    }
    assert reader.failures == 0  # what a board cannot do is no failure,
    assert nvml.calls.count("power") == 1  # and is asked for once


def test_a_driver_that_does_not_tell_what_is_reserved(start):
    reader = start(ScriptedNvml(memory=NvmlError(13)))
    until(lambda: reader.state)
    owners = reader.state.memory.bytes_of
    assert "reserved" not in owners
    assert sum(owners.values()) == 80 * GB


@given(BYTES, BYTES, BYTES, BYTES, st.none() | BYTES, st.none() | BYTES, st.booleans())
def test_parts_are_never_negative_and_always_sum_up(
    used, pool, weights, graphs, allocator, process, in_allocator
):
    board = BoardMemory(100 * GB, used, 99 * GB - used, GB)
    facts = GpuFacts("7a", weights, graphs, in_allocator)
    found = memory_by_owner(board, pool, facts, allocator, process)
    assert min(found.bytes_of.values()) >= 0
    assert sum(found.bytes_of.values()) == board.total
    if found.bytes_of["other_processes"]:
        assert found.bytes_of["pool"] == pool


def test_a_hung_nvml_is_told_and_shows_nothing_old(start):
    nvml, skew = ScriptedNvml(), [0.0]
    reader = start(nvml, clock=lambda: time.monotonic() + skew[0])
    until(lambda: reader.state)
    nvml.hold.clear()
    calls = nvml.calls.count("processes")
    time.sleep(0.1)
    assert nvml.calls.count("processes") <= calls + 1
    skew[0] = 60.0
    assert reader.state is None
    until(lambda: reader.failures == 1)
    assert set(values(reader)) == {("poll_failures_total",)}
    assert "has not answered for" in reader.problem
    nvml.hold.set()
    until(lambda: reader.state)
    assert reader.problem is None
    assert reader.failures == 1


def test_failures_are_counted_and_a_lost_board_is_opened_again(start):
    nvml = ScriptedNvml(power=NvmlError(UNKNOWN))
    reader = start(nvml)
    until(lambda: reader.failures > 2)
    assert reader.state is not None
    assert reader.state.reading.power_watts is None
    nvml.answers["plain_memory"] = nvml.answers["memory"] = NvmlError(UNKNOWN)
    until(lambda: reader.state is None)
    assert reader.problem == "NVML does not tell the board's memory"
    nvml.answers |= ScriptedNvml().answers
    until(lambda: reader.state)
    failures = reader.failures
    time.sleep(0.1)
    assert reader.failures == failures


def test_without_a_driver_the_reason_is_told(start):
    def load() -> Any:
        raise NvmlError(12)

    reader = start(load)
    until(lambda: reader.failures)
    assert reader.state is None
    assert reader.problem == "NVML cannot be used: NVML error 12"
    assert set(values(reader)) == {("poll_failures_total",)}


def test_nothing_is_loaded_for_an_engine_on_the_cpu(start):
    def load() -> Any:
        raise AssertionError

    reader = start(load, Source(gpu=None))
    until(lambda: reader.problem == "the engine runs on the CPU")
    assert reader.failures == 0


def test_an_engine_that_restarts_has_no_memory_to_attribute(start):
    source = Source()
    reader = start(ScriptedNvml(), source)
    until(lambda: reader.state)
    ready, source.ready = source.ready, None
    until(lambda: reader.state is None)
    assert reader.problem == "the engine is restarting"
    source.ready = ready
    until(lambda: reader.state)


def test_xid_errors_are_counted_with_bounded_labels(start):
    nvml = ScriptedNvml()
    nvml.xids = [79, 79, *range(100, 100 + MAX_XIDS + 4)]
    reader = start(nvml)
    until(lambda: not nvml.xids and sum(reader.xid_errors.values()) == MAX_XIDS + 6)
    assert reader.xid_errors["79"] == 2
    assert reader.xid_errors["other"] == 5
    assert len(reader.xid_errors) == MAX_XIDS + 2
    assert values(reader)["xid_errors_total", "none"] == 0


def test_a_slice_of_a_board_is_found_by_its_own_name():
    failures: list[None] = []
    board = Board(ScriptedNvml(uuid="MIG-7a"), "7a", lambda: failures.append(None))
    assert board.name.uuid == "MIG-7a"
    assert not failures


def test_memory_that_does_not_add_up_is_not_believed():
    board = Board(
        ScriptedNvml(memory=SimpleNamespace(total=10, used=8, free=4)), "7a", lambda: None
    )
    with pytest.raises(BoardLost):
        board.read()
