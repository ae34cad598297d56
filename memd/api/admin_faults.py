"""Faults on demand over HTTP: see and replace the plan in force, where `debug.faults` is on."""

import logging
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from memd.api.body import body_schema, json_response, read_body
from memd.api.errors import ApiError
from memd.api.schemas import answers
from memd.api.schemas_admin import FaultsRequest
from memd.api.service import Service
from memd.engine.messages import ArmFaults
from memd.faults import FaultPlan

_log = logging.getLogger(__name__)


def fault_routes(service: Service) -> APIRouter:
    """The routes under /debug/faults."""
    router = APIRouter(prefix="/debug/faults")
    engine = service.engine

    async def tell(plan: FaultPlan | None) -> Response:
        """To the engine if one serves; the next one is told before it serves."""
        injected = None
        if engine.ready is not None:
            try:
                injected = (await engine.command(ArmFaults, plan=plan))["injected"]
            except ApiError as error:
                if plan is None or error.status != 503:
                    raise  # else the plan may have killed it before it could answer
        return json_response({"armed": armed_faults(service), "injected": injected})

    def require_on() -> None:
        if not service.live.current.debug.faults:
            raise ApiError(409, "debug.faults is off; it can be set at the start only", "refused")

    @router.get("", responses=answers(409))
    async def show() -> Response:
        require_on()
        return await tell(None)

    @router.put("", openapi_extra=body_schema(FaultsRequest), responses=answers(400, 408, 409, 413))
    async def arm(request: Request) -> Response:
        require_on()
        body = await read_body(request, FaultsRequest, service.limits)
        engine.faults = msgspec.convert(body.model_dump(), FaultPlan)
        _log.warning("faults armed: %s", engine.faults.armed() or "none")
        return await tell(engine.faults)

    return router


def armed_faults(service: Service) -> dict[str, Any] | None:
    """What shall go wrong; None unless faults can be injected at all."""
    if not service.live.current.debug.faults:
        return None
    return service.engine.faults.armed()
