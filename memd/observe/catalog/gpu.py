"""Declarations: the GPU, as NVML tells it."""

from memd.observe.catalog.common import GPU, NO_GPU
from memd.observe.family import Family

OWNERS = ("pool", "weights", "graphs", "other_self", "other_processes", "reserved", "free")
SENSORS = ("core", "memory")
THROTTLE_REASONS = ("power", "thermal", "hardware", "other")
ECC_KINDS = ("corrected", "uncorrected")
PCIE_DIRECTIONS = ("receive", "transmit")

GPUS = (
    Family(
        "memd_gpu_info",
        "gauge",
        "1; which board the daemon's GPU is",
        {
            **GPU,
            "uuid": "the board",
            "name": "the board",
            "driver": "the board",
            "index": "the board",
        },
        absent=NO_GPU,
    ),
    Family(
        "memd_gpu_memory_bytes",
        "gauge",
        "Memory by owner; sums to the board's total. other_processes is an estimate where NVML "
        "does not tell this process's use",
        {**GPU, "owner": OWNERS},
        absent=NO_GPU,
    ),
    Family(
        "memd_gpu_memory_estimated",
        "gauge",
        "1 if other_processes is an estimate: used less what the daemon knows of its own",
        GPU,
        absent=NO_GPU,
    ),
    Family(
        "memd_gpu_utilization_ratio",
        "gauge",
        "Share of the last sampling period in which a kernel ran",
        GPU,
        absent=NO_GPU,
    ),
    Family(
        "memd_gpu_temperature_celsius",
        "gauge",
        "Temperature by sensor",
        {**GPU, "sensor": SENSORS},
        absent=NO_GPU,
    ),
    Family("memd_gpu_power_watts", "gauge", "Power drawn", GPU, absent=NO_GPU),
    Family("memd_gpu_power_limit_watts", "gauge", "Power limit in force", GPU, absent=NO_GPU),
    Family(
        "memd_gpu_energy_joules",
        "counter",
        "Energy used since the driver was loaded",
        GPU,
        absent=NO_GPU,
    ),
    Family(
        "memd_gpu_throttled_seconds",
        "counter",
        "Time in which clocks were held down, by what NVML said at each poll",
        {**GPU, "reason": THROTTLE_REASONS},
        absent=NO_GPU,
    ),
    Family(
        "memd_gpu_ecc_errors",
        "counter",
        "ECC errors since the driver was loaded",
        {**GPU, "kind": ECC_KINDS},
        absent=NO_GPU,
    ),
    Family(
        "memd_gpu_xid_errors",
        "counter",
        "Critical driver errors since the daemon started, by Xid",
        {**GPU, "xid": "Xids that occurred, at most 16 and `other`; `none` is always 0"},
        absent=NO_GPU,
    ),
    Family(
        "memd_gpu_pcie_bytes",
        "counter",
        "PCIe traffic of the board, from NVML's rate at each poll",
        {**GPU, "direction": PCIE_DIRECTIONS},
        absent=NO_GPU,
    ),
    Family(
        "memd_gpu_nvlink_bytes",
        "counter",
        "NVLink traffic of the board, all links",
        {**GPU, "direction": PCIE_DIRECTIONS},
        absent=NO_GPU,
    ),
    Family("memd_gpu_poll_failures", "counter", "NVML calls that failed or did not return", GPU),
    Family(
        "memd_gpu_last_poll_timestamp_seconds",
        "gauge",
        "Last poll that told the board's memory",
        GPU,
        absent=NO_GPU,
    ),
)
