"""Health, version and metrics: answered from what is known here, never by asking the engine."""

import asyncio

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from memd import __version__
from memd.api.body import json_response
from memd.api.service import Service


def health_routes(service: Service) -> APIRouter:
    """Routes for balancers, supervisors and Prometheus."""
    router = APIRouter(tags=["health"])
    engine = service.engine

    @router.get("/health/live")
    async def live() -> Response:
        if engine.failure is not None or engine.stuck:
            return _unavailable({"status": "failed" if engine.failure else "stuck"})
        return json_response({"status": "ok"})

    @router.get("/health/ready")
    @router.get("/health")
    async def ready() -> Response:
        state = engine.state
        if state == "ready":
            return (
                _unavailable({"status": "stuck"})
                if engine.stuck
                else json_response({"status": "ok"})
            )
        if state == "loading":
            stage, progress = engine.loading
            return _unavailable({"status": state, "stage": stage, "progress": progress})
        return _unavailable({"status": state})

    @router.get("/version")
    async def version() -> Response:
        return json_response({"name": "memd", "version": __version__})

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        body, content_type = await asyncio.to_thread(service.metrics.render, accept)
        return Response(body, headers={"content-type": content_type})

    return router


def _unavailable(body: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(body), 503, {"retry-after": "2"}, "application/json")
