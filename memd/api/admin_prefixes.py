"""Prefixes over HTTP: what is cached, what a prompt would find, and pins.

Neither text nor token ids are answered: an operator sees sizes, holders and hits.
"""

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from memd.api.auth import Caller, author_of
from memd.api.body import body_schema, json_response, read_body
from memd.api.errors import ApiError
from memd.api.prepare import encode_prompt
from memd.api.schemas import answers
from memd.api.schemas_pool import ExplainRequest, PinRequest, PrefixAction
from memd.api.service import Service
from memd.engine.messages import Describe, Explain, PrefixCommand
from memd.types import PrefixOrder

_AGES = {"last_hit_age_seconds": "last_hit_at"}
_LEFT = {"pin_left_seconds": "pinned_until"}


def prefix_routes(service: Service) -> APIRouter:
    """The routes under /prefixes."""
    router = APIRouter(prefix="/prefixes")
    engine = service.engine
    acts = answers(400, 404, 408, 409, 413)

    async def act(
        prefix_id: str, action: Literal["pin", "unpin", "evict"], ttl_seconds: float | None = None
    ) -> dict[str, Any]:
        result = await engine.command(
            PrefixCommand, action=action, prefix_id=prefix_id, ttl_seconds=ttl_seconds
        )
        if not result.pop("found"):
            raise ApiError(404, f"no cached prefix has the id {prefix_id[:60]!r}", "not_found")
        return _in_unix_time(result)

    def note(request: Request, kind: str, body: PinRequest | PrefixAction, result: Any) -> None:
        author = author_of(request.state.caller, body.who)
        service.store.add_event(
            kind, f"{author}: {body.reason}", {"who": author, "reason": body.reason, **result}
        )

    @router.get("", responses=answers(400, 409))
    async def prefixes(
        limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
        sort: PrefixOrder = "tokens",
        tenant: Annotated[str | None, Query(max_length=64)] = None,
        pinned: bool | None = None,
    ) -> Response:
        listing = await engine.command(
            Describe, what="prefixes", limit=limit, sort=sort, tenant=tenant, pinned=pinned
        )
        rows = [_in_unix_time(row) for row in listing["prefixes"]]
        return json_response({**listing, "prefixes": rows})

    @router.post("/explain", openapi_extra=body_schema(ExplainRequest), responses=acts)
    async def explain(request: Request) -> Response:
        body = await read_body(request, ExplainRequest, service.limits)
        tokens, salt = await _asked(service, body)
        return json_response(await engine.command(Explain, tokens=tokens, salt=salt))

    @router.post("/{prefix_id}/pin", openapi_extra=body_schema(PinRequest), responses=acts)
    async def pin(request: Request, prefix_id: str) -> Response:
        body = await read_body(request, PinRequest, service.limits)
        result = await act(prefix_id, "pin", body.ttl_seconds)
        note(request, "prefix_pinned", body, result)
        return json_response(result)

    @router.post("/{prefix_id}/unpin", openapi_extra=body_schema(PrefixAction), responses=acts)
    async def unpin(request: Request, prefix_id: str) -> Response:
        body = await read_body(request, PrefixAction, service.limits)
        result = await act(prefix_id, "unpin")
        note(request, "prefix_unpinned", body, result)
        return json_response(result)

    @router.post("/{prefix_id}/evict", openapi_extra=body_schema(PrefixAction), responses=acts)
    async def evict(request: Request, prefix_id: str) -> Response:
        body = await read_body(request, PrefixAction, service.limits)
        result = await act(prefix_id, "evict")
        note(request, "prefix_evicted", body, result)
        return json_response(result)

    return router


async def _asked(service: Service, body: ExplainRequest) -> tuple[list[int], str]:
    """Tokens and salt of what is to be explained. Raises ApiError 404, RequestError."""
    engine = service.engine
    if body.request_id is not None:
        names = engine.sequences_of(body.request_id)
        if not names:
            raise ApiError(
                404, f"no open request has the id {body.request_id!r}", "not_found", "request_id"
            )
        sequence = engine.open[names[0]]
        return sequence.submit.prompt_tokens + sequence.token_ids, sequence.submit.salt
    model, ready = service.require_ready()
    given = body.prompt if body.prompt is not None else body.tokens
    assert given is not None
    param = "tokens" if body.prompt is None else "prompt"
    tokens = await encode_prompt(given, model, ready, param)
    return tokens, Caller(tenant=body.tenant).salt(body.cache_salt)


def _in_unix_time(row: dict[str, Any]) -> dict[str, Any]:
    """The engine's ages, and times left, as points in time that last."""
    now = time.time()
    for name, at in _AGES.items():
        if name in row:
            age = row.pop(name)
            row[at] = None if age is None else round(now - age, 3)
    for name, at in _LEFT.items():
        if name in row:
            left = row.pop(name)
            row[at] = None if left is None else round(now + left, 3)
    return row
