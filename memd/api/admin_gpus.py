"""The GPU over HTTP: what NVML said last, and whose its memory is."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from memd.api.body import json_response
from memd.api.service import Service
from memd.observe.gpu import GpuReader, GpuState


def gpus_routes(service: Service) -> APIRouter:
    """The route /gpus."""
    router = APIRouter()

    @router.get("/gpus")
    async def gpus() -> Response:
        reader = service.metrics.gpu
        state = reader.state if reader is not None else None
        return json_response(
            {
                "gpus": [] if reader is None or state is None else [_row(reader, state)],
                "problem": "telemetry is off" if reader is None else reader.problem,
                "every_seconds": None if reader is None else reader.every_seconds,
                "poll_failures": None if reader is None else reader.failures,
            }
        )

    return router


def _row(reader: GpuReader, state: GpuState) -> dict[str, Any]:
    """What is known of the GPU; null: NVML does not tell."""
    board, reading = state.board, state.reading
    return {
        "gpu": "0",
        "index": board.index or None,
        "uuid": board.uuid,
        "name": board.name,
        "driver": board.driver,
        "polled_at": reading.at,
        "memory": {
            "total_bytes": reading.memory.total,
            "by_owner_bytes": state.memory.bytes_of,
            "estimated": state.memory.estimated,
        },
        "utilization_ratio": reading.utilization_ratio,
        "temperature_celsius": {
            sensor: reading.temperatures_celsius.get(sensor) for sensor in ("core", "memory")
        },
        "power_watts": reading.power_watts,
        "power_limit_watts": reading.power_limit_watts,
        "energy_joules": reading.energy_joules,
        "throttled_by": None if reading.throttled_by is None else sorted(reading.throttled_by),
        "throttled_seconds": reader.throttled_seconds,
        "ecc_errors": reading.ecc_errors or None,
        "xid_errors": {xid: n for xid, n in reader.xid_errors.items() if n},
        "pcie_bytes_per_second": reading.pcie_bytes_per_second or None,
        "nvlink_bytes": reading.nvlink_bytes or None,
    }
