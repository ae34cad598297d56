"""One board as NVML tells it. What it cannot say is None or left out, never 0.

Every call may take long or never return: all of this runs on a thread of its own
(`memd.observe.gpu`). Values that cannot be true are dropped.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from memd.observe.gpu_memory import BoardMemory

# Bits of NVML's clocks event reasons that mean slower clocks than the load would get.
THROTTLE_BITS = {
    "power": 0x04 | 0x80,  # software power cap, hardware power brake
    "thermal": 0x20 | 0x40,  # software and hardware thermal slowdown
    "hardware": 0x08,  # other hardware slowdown
    "other": 0x10,  # sync boost
}
_ALL_LINKS = 0xFFFFFFFF
_HOTTEST_CELSIUS = 150
_LARGEST_WATTS = 20_000
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Reading:
    """What one poll has told.

    Args:
        at: Unix seconds.
        memory: Of the board.
        process_bytes: By process number, for those that are told.
        utilization_ratio: 0 to 1.
        temperatures_celsius: By sensor.
        power_watts, power_limit_watts: Drawn, and the most allowed.
        energy_joules: Since the driver was loaded.
        ecc_errors: By kind, since the driver was loaded.
        nvlink_bytes: By direction, since the driver was loaded.
        pcie_bytes_per_second: By direction.
        throttled_by: Reasons for which clocks are held down now; None: not told.
    """

    at: float
    memory: BoardMemory
    process_bytes: dict[int, int] = field(default_factory=dict)
    utilization_ratio: float | None = None
    temperatures_celsius: dict[str, float] = field(default_factory=dict)
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    ecc_errors: dict[str, int] = field(default_factory=dict)
    nvlink_bytes: dict[str, int] = field(default_factory=dict)
    pcie_bytes_per_second: dict[str, float] = field(default_factory=dict)
    throttled_by: frozenset[str] | None = None


@dataclass(frozen=True)
class BoardName:
    """Which board it is."""

    uuid: str
    name: str
    driver: str
    index: str


class BoardLost(Exception):
    """NVML does not tell even the board's memory: it is to be opened again."""


class Board:
    """An open board.

    Args:
        nvml: The module `pynvml`, or what has its functions.
        uuid: As CUDA tells it, without NVML's prefix.
        on_failure: Called for each call that fails; not for what a board cannot do.

    Raises:
        nvml.NVMLError: NVML does not know the board.
    """

    def __init__(self, nvml: Any, uuid: str, on_failure: Callable[[], None]) -> None:
        self._nvml = nvml
        self._unsupported: set[str] = set()
        self._on_failure = on_failure
        self._handle, full = self._find(uuid)
        self.name = BoardName(
            full,
            nvml.nvmlDeviceGetName(self._handle),
            nvml.nvmlSystemGetDriverVersion(),
            self._index(),
        )
        self._events = self._watch_events()

    def read(self) -> Reading:
        """Ask for everything.

        Raises:
            BoardLost: even the memory is not told.
        """
        nvml, handle = self._nvml, self._handle
        memory = self._memory()
        power = self._ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
        limit = self._ask("limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3)
        busy = self._ask("busy", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        return Reading(
            at=time.time(),
            memory=memory,
            process_bytes=self._processes(),
            utilization_ratio=_within(busy, 1),
            temperatures_celsius=self._temperatures(),
            power_watts=_within(power, _LARGEST_WATTS),
            power_limit_watts=_within(limit, _LARGEST_WATTS),
            energy_joules=self._ask(
                "energy", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
            ),
            ecc_errors=self._ecc_errors(),
            nvlink_bytes=self._nvlink(),
            pcie_bytes_per_second=self._pcie(),
            throttled_by=self._throttled_by(),
        )

    def wait_for_xid(self, timeout_seconds: float) -> int | None:
        """The next critical error of the driver; None: none came, or NVML cannot tell at once.

        Raises:
            BoardLost: NVML cannot wait for errors any more.
        """
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, int(timeout_seconds * 1000))
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                return None
            self._on_failure()
            raise BoardLost(str(error)) from None
        return int(event.eventData)

    @property
    def tells_xids(self) -> bool:
        """Whether `wait_for_xid` works on this board."""
        return self._events is not None

    def _find(self, uuid: str) -> tuple[Any, str]:
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"), f"GPU-{uuid}"
        except nvml.NVMLError:
            return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"), f"MIG-{uuid}"

    def _index(self) -> str:
        index = self._ask("index", lambda: self._nvml.nvmlDeviceGetIndex(self._handle))
        return "" if index is None else str(index)

    def _watch_events(self) -> Any:
        nvml = self._nvml

        def register() -> Any:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            return events

        return self._ask("events", register)

    def _ask(self, what: str, call: Callable[[], Answer]) -> Answer | None:
        """The answer, or None; what a board cannot do is asked for once."""
        if what in self._unsupported:
            return None
        nvml = self._nvml
        try:
            return call()
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                self._unsupported.add(what)
            else:
                self._on_failure()
            return None

    def _memory(self) -> BoardMemory:
        nvml, handle = self._nvml, self._handle
        told = self._ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2))
        reserved = None
        if told is not None:
            reserved = told.total - told.used - told.free
        else:
            told = self._ask("plain memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        if told is None or told.used + told.free + (reserved or 0) != told.total:
            raise BoardLost("NVML does not tell the board's memory")
        if min(told.used, told.free, reserved or 0) < 0:
            raise BoardLost("NVML tells memory that does not add up")
        return BoardMemory(told.total, told.used, told.free, reserved)

    def _processes(self) -> dict[int, int]:
        nvml = self._nvml
        listed = self._ask(
            "processes", lambda: nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        )
        return {
            process.pid: process.usedGpuMemory
            for process in listed or ()
            if process.usedGpuMemory is not None
        }

    def _temperatures(self) -> dict[str, float]:
        nvml, handle = self._nvml, self._handle
        told = {
            "core": self._ask(
                "temperature",
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
            "memory": self._field(nvml.NVML_FI_DEV_MEMORY_TEMP, "uiVal"),
        }
        return {
            sensor: value
            for sensor, value in told.items()
            if value is not None and 0 < value <= _HOTTEST_CELSIUS
        }

    def _field(self, number: int, kind: str, scope: int = 0) -> int | None:
        nvml = self._nvml

        def call() -> int:
            (answer,) = nvml.nvmlDeviceGetFieldValues(self._handle, [(number, scope)])
            if answer.nvmlReturn:
                raise nvml.NVMLError(answer.nvmlReturn)
            return int(getattr(answer.value, kind))

        return self._ask(f"field {number}", call)

    def _ecc_errors(self) -> dict[str, int]:
        nvml = self._nvml
        kinds = {
            "corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            "uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        }
        told = {
            kind: self._ask(
                f"ecc {kind}",
                partial(
                    nvml.nvmlDeviceGetTotalEccErrors, self._handle, number, nvml.NVML_VOLATILE_ECC
                ),
            )
            for kind, number in kinds.items()
        }
        return {kind: count for kind, count in told.items() if count is not None}

    def _nvlink(self) -> dict[str, int]:
        nvml = self._nvml
        told = {
            "receive": self._field(
                nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, "ullVal", _ALL_LINKS
            ),
            "transmit": self._field(
                nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, "ullVal", _ALL_LINKS
            ),
        }
        return {way: kibibytes * 1024 for way, kibibytes in told.items() if kibibytes is not None}

    def _pcie(self) -> dict[str, float]:
        nvml = self._nvml
        ways = {"receive": nvml.NVML_PCIE_UTIL_RX_BYTES, "transmit": nvml.NVML_PCIE_UTIL_TX_BYTES}
        told = {
            way: self._ask(
                f"pcie {way}",
                partial(nvml.nvmlDeviceGetPcieThroughput, self._handle, number),
            )
            for way, number in ways.items()
        }
        return {way: kilobytes * 1e3 for way, kilobytes in told.items() if kilobytes is not None}

    def _throttled_by(self) -> frozenset[str] | None:
        nvml = self._nvml
        bits = self._ask(
            "throttling", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
        )
        if bits is None:
            bits = self._ask(
                "throttling before 535",
                lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle),
            )
        if bits is None:
            return None
        return frozenset(reason for reason, mask in THROTTLE_BITS.items() if bits & mask)


def _within(value: float | None, largest: float) -> float | None:
    return value if value is not None and 0 <= value <= largest else None
