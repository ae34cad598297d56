"""Health, version and metrics: answered from what is known here, never by asking the engine."""

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from memd import __version__
from memd.api.body import json_response
from memd.api.service import Service


def health_routes(service: Service) -> APIRouter:
    """Routes for balancers, supervisors and Prometheus."""
    router = APIRouter(tags=["health"])
    engine = service.engine
    unavailable: dict[int | str, dict[str, Any]] = {503: {"description": "Not serving, and why"}}

    def failed() -> dict[str, Any]:
        # Health is open to all: where there are keys, those who have one ask for the status.
        reason = {"reason": engine.failure} if service.keys is None else {}
        return {"status": "failed", **reason}

    @router.get("/health/live", responses=unavailable)
    async def live() -> Response:
        if engine.failure is not None:
            return _unavailable(failed())
        return json_response({"status": "ok"})

    @router.get("/health/ready", responses=unavailable)
    @router.get("/health", responses=unavailable)
    async def ready() -> Response:
        state = engine.state
        if state == "ready":
            return json_response({"status": "ok"})
        retry_after = 1 if state == "restarting" else 2
        if state in ("loading", "restarting"):
            stage, progress = engine.loading
            body = {"status": state, "stage": stage, "progress": progress}
            return _unavailable(body, retry_after)
        return _unavailable(failed() if state == "failed" else {"status": state}, retry_after)

    @router.get("/version")
    async def version() -> Response:
        return json_response({"name": "memd", "version": __version__})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        body, content_type = await asyncio.to_thread(service.metrics.render, accept)
        return Response(body, headers={"content-type": content_type})

    return router


def _unavailable(body: dict[str, Any], retry_after_seconds: int = 2) -> Response:
    headers = {"retry-after": str(retry_after_seconds)}
    return Response(msgspec.json.encode(body), 503, headers, "application/json")
