"""The admin API under /admin/v1: what the daemon and its pool do, and the operator's actions."""

import os
import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from memd.api.admin_alerts import alert_routes
from memd.api.admin_faults import armed_faults, fault_routes
from memd.api.admin_gpus import gpus_routes
from memd.api.admin_history import history_routes
from memd.api.admin_jobs import job_routes
from memd.api.admin_prefixes import prefix_routes
from memd.api.admin_settings import settings_routes
from memd.api.admin_stacks import stacks_routes
from memd.api.admin_tenants import tenant_routes
from memd.api.admin_traces import trace_routes
from memd.api.auth import author_of
from memd.api.block_maps import describe_blocks
from memd.api.body import body_schema, json_response, read_body
from memd.api.errors import ApiError
from memd.api.recovery import OpenSequence
from memd.api.schemas import INT64_MAX, answers
from memd.api.schemas_admin import ReclaimRequest
from memd.api.schemas_pool import RequestChange
from memd.api.service import Service
from memd.api.support_bundle import bundle_routes
from memd.engine.messages import Describe, PoolCommand, Preempt, Ready, SetPriority
from memd.engine.snapshot_types import EngineSnapshot, Histogram

_Reason = Annotated[
    str | None, Query(min_length=1, max_length=500, description="Why; kept in the history")
]
_CANCELLED = "the request was cancelled by the operator"


def admin_routes(service: Service) -> APIRouter:
    """All routes under /admin/v1."""
    router = APIRouter(prefix="/admin/v1", tags=["admin"], responses=answers(401, 403, 500, 503))
    router.include_router(settings_routes(service), responses=answers(400, 404, 408, 409, 413))
    router.include_router(fault_routes(service))
    router.include_router(alert_routes(service))
    router.include_router(job_routes(service))
    router.include_router(stacks_routes(service))
    router.include_router(bundle_routes(service))
    router.include_router(history_routes(service))
    router.include_router(gpus_routes(service))
    router.include_router(prefix_routes(service))
    router.include_router(tenant_routes(service))
    router.include_router(trace_routes(service))
    _add_pool_routes(router, service)
    _add_request_routes(router, service)

    @router.get("/status")
    async def status(request: Request) -> Response:
        caller = request.state.caller
        asked_by = {"name": caller.name, "scopes": caller.scopes}
        return json_response({**_status(service), "caller": asked_by})

    return router


def _add_pool_routes(router: APIRouter, service: Service) -> None:
    engine = service.engine

    async def act(
        request: Request, action: Any, reason: str | None, pages: int | None = None
    ) -> Response:
        result = await engine.command(PoolCommand, action=action, pages=pages)
        _note(service, request, f"pool_{action}", reason, result)
        return json_response(result)

    @router.get("/pool")
    async def pool() -> Response:
        snapshot = _snapshot(service)
        layout = engine.ready.pool if engine.ready else {}
        counts = msgspec.structs.asdict(snapshot.pool)
        # Histograms are for /metrics.
        counts = {key: each for key, each in counts.items() if not isinstance(each, Histogram)}
        elastic = msgspec.structs.asdict(snapshot.elastic)
        del elastic["defrag_step_seconds"]
        packing = _packing(snapshot)
        return json_response({"layout": layout, **counts, **elastic, "packing": packing})

    @router.get("/pool/blocks", responses=answers(400, 404, 409))
    async def blocks(
        offset: Annotated[int, Query(ge=0, le=INT64_MAX)] = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
        at: Annotated[float | None, Query(ge=0, le=1e11, description="Then, Unix seconds")] = None,
    ) -> Response:
        if at is not None:
            return json_response(await service.maps.at(at, offset, limit))
        return json_response(await describe_blocks(engine, offset, limit))

    @router.get("/pool/maps")
    async def maps() -> Response:
        kept = service.maps
        return json_response(
            {
                "every_seconds": kept.every_seconds,
                "keep_seconds": kept.keep_seconds,
                "times": kept.times,
                "size_bytes": kept.size_bytes,
            }
        )

    @router.post(
        "/pool/reclaim",
        openapi_extra=body_schema(ReclaimRequest),
        responses=answers(400, 408, 409, 413),
    )
    async def reclaim(request: Request, reason: _Reason = None) -> Response:
        headers, body = request.headers, ReclaimRequest()
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            body = await read_body(request, ReclaimRequest, service.limits)
        return await act(request, "reclaim", reason, body.pages)

    @router.post("/pool/flush", responses=answers(400, 409))
    async def flush(request: Request, reason: _Reason = None) -> Response:
        return await act(request, "flush", reason)

    @router.post("/pool/defrag", responses=answers(400, 409))
    async def defrag(request: Request, reason: _Reason = None) -> Response:
        return await act(request, "defrag", reason)

    @router.post("/pool/audit", responses=answers(400, 409))
    async def audit(request: Request, reason: _Reason = None) -> Response:
        return await act(request, "audit", reason)


def _add_request_routes(router: APIRouter, service: Service) -> None:
    engine = service.engine

    @router.get("/requests", responses=answers(409))
    async def requests() -> Response:
        rows = await _described(service)
        return json_response(
            {"requests": [_row(service, each, rows) for each in engine.open.values()]}
        )

    @router.get("/requests/{request_id}", responses=answers(404, 409))
    async def request(request_id: str) -> Response:
        rows = await _described(service, shares=True)
        found = [_row(service, engine.open[name], rows) for name in engine.sequences_of(request_id)]
        if not found:
            raise _no_request(request_id)
        return json_response({"id": request_id, "sequences": found})

    @router.delete("/requests/{request_id}", responses=answers(400, 404))
    async def cancel(request: Request, request_id: str, reason: _Reason = None) -> Response:
        count = engine.end_open(_CANCELLED, "cancelled", request_id)
        if count == 0:
            raise _no_request(request_id)
        result = {"id": request_id, "cancelled": count}
        _note(service, request, "request_cancel", reason, result)
        return json_response(result)

    @router.post("/requests/{request_id}/preempt", responses=answers(400, 404, 409))
    async def preempt(request: Request, request_id: str, reason: _Reason = None) -> Response:
        names = engine.sequences_of(request_id)
        if not names:
            raise _no_request(request_id)
        for name in names:
            await engine.command(Preempt, request_id=name)
        result = {"id": request_id, "preempted": len(names)}
        _note(service, request, "request_preempt", reason, result)
        return json_response(result)

    @router.patch(
        "/requests/{request_id}",
        openapi_extra=body_schema(RequestChange),
        responses=answers(400, 404, 408, 409, 413),
    )
    async def change(request: Request, request_id: str) -> Response:
        body = await read_body(request, RequestChange, service.limits)
        names = engine.sequences_of(request_id)
        if not names:
            raise _no_request(request_id)
        for name in names:
            await engine.command(SetPriority, request_id=name, priority=body.priority)
            if name in engine.open:  # the next engine gets it with this one too
                engine.open[name].set_priority(body.priority)
        result = {"id": request_id, "priority": body.priority}
        _note(service, request, "request_priority", body.reason, result)
        return json_response(result)


def _note(
    service: Service, request: Request, kind: str, reason: str | None, result: dict[str, Any]
) -> None:
    """Keep what an operator did, and why."""
    who = author_of(request.state.caller, None)
    message = f"{kind.replace('_', ' ')} by {who}: {reason or 'no reason given'}"
    service.store.add_event(kind, message, {"who": who, "reason": reason, **result})


def _no_request(request_id: str) -> ApiError:
    return ApiError(404, f"no open request has the id {request_id[:128]!r}", "not_found")


async def _described(service: Service, shares: bool = False) -> dict[str, dict[str, Any]]:
    """The engine's own view of the open sequences, by id."""
    reply = await service.engine.command(Describe, what="requests", shares=shares)
    return {row.pop("request_id"): row for row in reply["requests"]}


def _row(
    service: Service, sequence: OpenSequence, rows: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    submit, first = sequence.submit, sequence.first_token_at
    waited = None if first is None else round(first - sequence.opened_at, 3)
    return {
        "id": submit.request_id,
        "age_seconds": round(service.engine.age_seconds(sequence), 3),
        "prompt_tokens": len(submit.prompt_tokens),
        "generated_tokens": len(sequence.token_ids),
        "time_to_first_token_seconds": waited,
        "max_tokens": submit.sampling.max_tokens,
        "priority": submit.priority,
        "tenant": submit.tenant,
        **rows.get(submit.request_id, {}),
    }


def _snapshot(service: Service) -> EngineSnapshot:
    if service.engine.snapshot is None:
        service.engine.require_ready()
        raise ApiError(503, "the engine has not reported yet", "loading")
    return service.engine.snapshot


def _elastic_status(ready: Ready | None, snapshot: EngineSnapshot) -> dict[str, Any]:
    """How much memory the pool holds, and what it is about to do about it."""
    layout, elastic = ready.pool if ready else {}, snapshot.elastic
    return {
        "committed_bytes": snapshot.pool.committed_bytes,
        "limit_pages": elastic.limit_pages,
        "target_pages": elastic.target_pages,
        "limit_waits_for": elastic.limit_waits_for,
        "fragmentation_ratio": elastic.fragmentation_ratio,
        "defrag_running": elastic.defrag_running,
        "under_pressure": elastic.under_pressure,
        "elastic": layout.get("elastic"),
        "elastic_reason": layout.get("elastic_reason"),
    }


def _packing(snapshot: EngineSnapshot) -> dict[str, Any] | None:
    """What packed pages save and lose; null: all pages are full."""
    if snapshot.packing is None:
        return None
    return {"pages": snapshot.pool.packed_pages, **msgspec.structs.asdict(snapshot.packing)}


def _status(service: Service) -> dict[str, Any]:
    engine = service.engine
    ready, snapshot = engine.ready, engine.snapshot
    status: dict[str, Any] = {
        "state": engine.state,
        "pid": os.getpid(),
        "uptime_seconds": round(time.monotonic() - service.started_at, 3),
        "settings_revision": service.live.revision,
        "model": {"name": service.name, **(ready.model if ready else {})},
        "max_model_len": ready.max_model_len if ready else None,
        "engine": {
            "pid": ready.pid if ready else None,
            "restarts": sum(engine.restarts.values()),
        },
        "faults": armed_faults(service),
        "history": service.store.status(),
        "requests": None,
        "tokens": None,
        "pool": None,
        "packing": None,
    }
    if engine.state in ("loading", "restarting"):
        status["stage"], status["progress"] = engine.loading
    if engine.failure is not None:
        status["failure"] = engine.failure
    if snapshot is not None:
        pool = snapshot.pool
        status["requests"] = {
            "running": snapshot.running,
            "waiting": sum(snapshot.waiting.values()),
        }
        status["tokens"] = {  # since this engine started
            "prompt": snapshot.prompt_tokens,
            "generated": snapshot.generated_tokens,
        }
        status["pool"] = {
            "capacity_pages": pool.capacity_pages,
            "active_pages": pool.active_pages,
            "cached_pages": pool.cached_pages,
            "pinned_pages": pool.pinned_pages,
            "quarantined_pages": pool.quarantined_pages,
            "free_pages": pool.free_pages,
            "occupied_ratio": 1 - pool.free_pages / pool.capacity_pages,
            "watermark": {"high": pool.watermark_high, "low": pool.watermark_low},
            **_elastic_status(ready, snapshot),
        }
        status["packing"] = _packing(snapshot)
    return status
