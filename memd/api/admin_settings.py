"""Live settings over HTTP: read, change, preview, history, undo."""

from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from memd.api.body import body_schema, json_response, read_body
from memd.api.errors import ApiError, error_body
from memd.api.schemas import SettingsChange, SettingsPreview, SettingsUndo
from memd.api.service import Service
from memd.config import LIVE_KEYS, Settings, dump, flatten, leaves
from memd.engine.messages import ApplySettings, PoolSnapshot
from memd.errors import SettingsError
from memd.settings import NothingToUndo, StaleRevision

_OWN = {"engine.max_waiting"}  # put in force here, not by the engine


def settings_routes(service: Service) -> APIRouter:
    """The routes under /settings."""
    router = APIRouter(prefix="/settings")
    live, counts = service.live, service.metrics.setting_changes

    async def apply(revision: int, values: dict[str, Any]) -> None:
        theirs = {key: value for key, value in values.items() if key not in _OWN}
        await service.engine.command(ApplySettings, revision=revision, values=theirs)

    def answer(changes: dict[str, Any]) -> Response:
        for key in changes:
            counts[key, "applied"] += 1
        return json_response(
            {"revision": live.revision, "settings": dump(live.current), "changes": changes}
        )

    @router.get("")
    async def read() -> Response:
        return json_response(
            {"revision": live.revision, "settings": dump(live.current), "live": _live(service)}
        )

    @router.patch("", openapi_extra=body_schema(SettingsChange))
    async def change(request: Request) -> Response:
        body = await read_body(request, SettingsChange, service.limits)
        who = _who(request, body.who)
        try:
            return answer(await live.change(body.changes, body.revision, who, body.reason, apply))
        except StaleRevision as error:
            return _stale(error)
        except (SettingsError, ApiError):
            for key in flatten(body.changes).keys() & LIVE_KEYS:
                counts[key, "rejected"] += 1
            raise

    @router.get("/history")
    async def history() -> Response:
        return json_response({"history": [asdict(row) for row in live.history]})

    @router.post("/undo", openapi_extra=body_schema(SettingsUndo))
    async def undo(request: Request) -> Response:
        body = await read_body(request, SettingsUndo, service.limits)
        try:
            return answer(await live.undo(_who(request, body.who), body.reason, apply))
        except NothingToUndo as error:
            raise ApiError(409, str(error), "nothing_to_undo") from None

    @router.post("/preview", openapi_extra=body_schema(SettingsPreview))
    async def preview(request: Request) -> Response:
        body = await read_body(request, SettingsPreview, service.limits)
        try:
            proposed, changes = live.validate(body.changes)
        except SettingsError as error:
            return json_response(
                {"valid": False, "problems": error.problems, "changes": {}, "effect": None}
            )
        snapshot = service.engine.snapshot
        effect = None if snapshot is None else reclaim_effect(snapshot.pool, proposed)
        return json_response({"valid": True, "problems": {}, "changes": changes, "effect": effect})

    return router


def _who(request: Request, said: str | None) -> str:
    """The name of the key, which cannot be made up; without keys what the caller says."""
    name: str | None = request.state.caller.name
    return name or said or "local"


def reclaim_effect(pool: PoolSnapshot, proposed: Settings) -> dict[str, Any]:
    """What background reclaim would do at once under other watermarks.

    Returns:
        `occupied_ratio` now and after, `reclaimed_pages` in between; pages that eviction cannot
        take bound it.
    """
    marks = proposed.memory.watermark
    occupied = pool.capacity_pages - pool.free_pages
    reclaims = occupied >= marks.high * pool.capacity_pages or (
        pool.reclaiming and occupied > marks.low * pool.capacity_pages
    )
    surplus = occupied - int(marks.low * pool.capacity_pages)
    reclaimed = min(surplus, pool.cached_pages) if reclaims else 0
    return {
        "occupied_ratio": occupied / pool.capacity_pages,
        "occupied_ratio_after": (occupied - reclaimed) / pool.capacity_pages,
        "reclaimed_pages": reclaimed,
    }


def _stale(error: StaleRevision) -> Response:
    body = error_body(str(error), 409, "stale_revision", "revision")
    return Response(
        msgspec.json.encode({**body, "revision": error.current}), 409, None, "application/json"
    )


def _live(service: Service) -> dict[str, Any]:
    values, defaults = flatten(dump(service.live.current)), flatten(dump(Settings()))
    return {
        key: {
            "value": values[key],
            "default": defaults[key],
            "description": field.description or "",
        }
        for key, field in leaves().items()
        if key in LIVE_KEYS
    }
