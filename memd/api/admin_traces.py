"""Traces over HTTP: start and stop a recording, list what there is, export one as JSON lines."""

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from memd.api.auth import author_of
from memd.api.body import body_schema, json_response, read_body
from memd.api.errors import ApiError
from memd.api.schemas import answers
from memd.api.schemas_traces import TraceStart, TraceStop
from memd.api.service import Service
from memd.api.trace_recorder import DIGEST_BYTES, Recording
from memd.simulate.trace import TraceHeader, TraceRequest, encode_line
from memd.store.errors import StoreError
from memd.store.traces import list_traces, sequences_after, trace_row

_CHUNK_ROWS = 500


def trace_routes(service: Service) -> APIRouter:
    """The routes under /traces."""
    router = APIRouter(prefix="/traces")
    traces, store = service.traces, service.store
    acts = answers(400, 408, 409, 413)

    @router.get("", responses=answers(400))
    async def listing(limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
        traces.keep_alive()
        await traces.flush()
        rows = await store.query(list_traces(limit))
        current = traces.current
        now = current.id if current is not None else None
        return json_response({"recording": now, "traces": [_listed(row, now) for row in rows]})

    @router.post("/start", openapi_extra=body_schema(TraceStart), responses=acts)
    async def start(request: Request) -> Response:
        body = await read_body(request, TraceStart, service.limits)
        who = author_of(request.state.caller, body.who)
        return json_response(_told(traces.begin(who, body.reason, body.tenant_names)))

    @router.post("/stop", openapi_extra=body_schema(TraceStop), responses=acts)
    async def stop(request: Request) -> Response:
        body = await read_body(request, TraceStop, service.limits)
        who = author_of(request.state.caller, body.who)
        recording = traces.end(who, body.reason)
        with suppress(StoreError):  # then the rows wait, and are told of as the history is
            await traces.flush()
        return json_response(_told(recording))

    @router.get(
        "/{trace_id}/export",
        responses={200: {"content": {"application/x-ndjson": {}}}, **answers(404)},
        response_class=StreamingResponse,
    )
    async def export(trace_id: str) -> Response:
        await traces.flush()
        row = await store.query(trace_row(trace_id[:64].replace("\0", "")))
        if row is None:
            raise ApiError(404, f"no trace has the id {trace_id[:64]!r}", "not_found")
        header = _header(row, traces.current)
        lines = _lines(service, header)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    return router


def _header(row: dict[str, Any], current: Recording | None) -> TraceHeader:
    header = msgspec.convert(row["header"], TraceHeader)
    if current is not None and current.id == header.id:
        header = replace(header, dropped=current.dropped)
    return header


async def _lines(service: Service, header: TraceHeader) -> AsyncIterator[bytes]:
    """Chunk by chunk, so that no trace is in memory as a whole."""
    yield encode_line(header)
    after = (-1.0, 0)
    while rows := await service.store.query(sequences_after(header.id, after, _CHUNK_ROWS)):
        yield b"".join(encode_line(_request(row, header.started_at)) for row in rows)
        after = (rows[-1]["time"], rows[-1]["id"])


def _request(row: dict[str, Any], started_at: float) -> TraceRequest:
    pages = row["pages"].hex()
    step = 2 * DIGEST_BYTES
    return TraceRequest(
        arrival_seconds=round(max(0.0, row["time"] - started_at), 6),
        request=row["request"].hex(),
        namespace=row["namespace"].hex(),
        tenant=row["tenant"],
        priority=row["priority"],
        prompt_tokens=row["prompt_tokens"],
        output_tokens=row["output_tokens"],
        max_tokens=row["max_tokens"],
        outcome=row["outcome"],
        duration_seconds=round(row["duration_seconds"], 6),
        pages=tuple(pages[at : at + step] for at in range(0, len(pages), step)),
        cached_tokens=row["cached_tokens"],
    )


def _listed(row: dict[str, Any], current: str | None) -> dict[str, Any]:
    header = row["header"]
    state = "ended" if row["ended_at"] is not None else "interrupted"
    return {
        "id": row["id"],
        "state": "recording" if row["id"] == current else state,
        "kind": row["kind"],
        "started_at": row["time"],
        "ended_at": row["ended_at"],
        "sequences": row["sequences"],
        "dropped": row["dropped"],
        "size_bytes": row["size_bytes"],
        "tenants": header["tenants"],
        "model": header["model"].get("name"),
        "who": row["who"],
        "reason": row["reason"],
    }


def _told(recording: Recording) -> dict[str, Any]:
    return {
        "id": recording.id,
        "kind": recording.kind,
        "started_at": recording.header.started_at,
        "ended_at": recording.ended_at,
        "recorded": recording.recorded,
        "dropped": recording.dropped,
        "tenants": recording.header.tenants,
    }
