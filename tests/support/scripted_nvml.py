"""NVML as a test wants it to answer: the functions and constants of the module `pynvml`."""

import threading
from types import SimpleNamespace
from typing import Any

GB = 10**9
NOT_SUPPORTED, TIMEOUT, UNKNOWN = 3, 10, 999


class NvmlError(Exception):
    """What NVML's functions raise."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class ScriptedNvml:
    """One board of 80 GB. `answers` are values by function; an error in it is raised.

    Attributes:
        calls: Names of the functions called.
        hold: While it is clear, memory is not told: the call hangs.
        xids: Errors of the driver, to be reported one after the other.
    """

    NVMLError = NvmlError
    NVML_ERROR_NOT_SUPPORTED = NOT_SUPPORTED
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_TIMEOUT = TIMEOUT
    NVML_TEMPERATURE_GPU = 0
    NVML_FI_DEV_MEMORY_TEMP = 82
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_PCIE_UTIL_RX_BYTES = 1
    nvmlMemory_v2 = 0x2000028
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "uuid": "GPU-7a",
            "memory": SimpleNamespace(total=80 * GB, used=30 * GB, free=49 * GB),
            "plain_memory": SimpleNamespace(total=80 * GB, used=31 * GB, free=49 * GB),
            "processes": [SimpleNamespace(pid=77, usedGpuMemory=25 * GB)],
            "utilization": SimpleNamespace(gpu=40),
            "temperature": 61,
            "power": 350_500,
            "limit": 700_000,
            "energy": 12_000,
            "ecc": 0,
            "throttle": 0,
            "pcie": 2_000,
            "fields": {82: 70, 138: 4, 139: 8},
        } | answers
        self.calls: list[str] = []
        self.hold = threading.Event()
        self.hold.set()
        self.xids: list[int] = []

    def _answer(self, name: str) -> Any:
        self.calls.append(name)
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self._answer("uuid"):
            raise NvmlError(6)
        return "handle"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA Test 80GB"

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return 3

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Any:
        assert self.hold.wait(30)
        return self._answer("memory" if version else "plain_memory")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:
        return self._answer("processes")

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return self._answer("utilization")

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> Any:
        return self._answer("temperature")

    def nvmlDeviceGetPowerUsage(self, handle: str) -> Any:
        return self._answer("power")

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> Any:
        return self._answer("limit")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> Any:
        return self._answer("energy")

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> Any:
        return self._answer("ecc")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> Any:
        return self._answer("throttle")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> Any:
        return self._answer("throttle")

    def nvmlDeviceGetPcieThroughput(self, handle: str, direction: int) -> Any:
        return self._answer("pcie")

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[tuple[int, int]]) -> Any:
        told = self._answer("fields")
        return [
            SimpleNamespace(
                nvmlReturn=0 if number in told else NOT_SUPPORTED,
                value=SimpleNamespace(uiVal=told.get(number, 0), ullVal=told.get(number, 0)),
            )
            for number, _ in fields
        ]

    def nvmlEventSetCreate(self) -> object:
        return self._answer("events") if "events" in self.answers else "events"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: object) -> None:
        assert kinds == self.nvmlEventTypeXidCriticalError

    def nvmlEventSetWait_v2(self, events: object, timeout_milliseconds: int) -> Any:
        if self.xids:
            return SimpleNamespace(eventData=self.xids.pop(0))
        threading.Event().wait(min(timeout_milliseconds, 20) / 1000)
        raise NvmlError(TIMEOUT)
