"""Live settings over HTTP: read, preview, change, confirm, undo, reload, history, export."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from memd.api.auth import author_of
from memd.api.body import body_schema, json_response, read_body
from memd.api.errors import ApiError, error_body
from memd.api.schemas import INT64_MAX
from memd.api.schemas_settings import (
    SettingsChange,
    SettingsConfirm,
    SettingsPreview,
    SettingsReload,
    SettingsUndo,
)
from memd.api.service import Service
from memd.api.settings_view import NO_PREDICTION, effect_view, history_view, settings_view
from memd.config_export import FileFormat, export
from memd.errors import SettingsError
from memd.settings_history import CannotUndo, Kind, Source
from memd.settings_saved import SavedError
from memd.settings_state import Author, StaleRevision, Unconfirmed

Text = Annotated[str | None, Query(min_length=1, max_length=200)]
Seconds = Annotated[float | None, Query(ge=0, le=1e11, description="Unix seconds")]


def settings_routes(service: Service) -> APIRouter:
    """The routes under /settings."""
    router = APIRouter(prefix="/settings")
    _add_views(router, service)
    _add_changes(router, service)
    _add_preview(router, service)

    @router.post("/reload", openapi_extra=body_schema(SettingsReload))
    async def reload(request: Request) -> Response:
        headers, body = request.headers, SettingsReload()
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            body = await read_body(request, SettingsReload, service.limits)
        author = Author(author_of(request.state.caller, body.who), body.reason, body.source)
        results = await service.live.reload(author)
        return json_response({"revision": service.live.revision, "results": results})

    return router


def _add_views(router: APIRouter, service: Service) -> None:
    live, effects = service.live, service.effects

    @router.get("")
    async def read() -> Response:
        return json_response(settings_view(live, time.monotonic()))

    @router.get("/history")
    async def history(
        key: Text = None,
        who: Text = None,
        source: Source | None = None,
        kind: Kind | None = None,
        since: Seconds = None,
        until: Seconds = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
        measured: Annotated[bool, Query(description="With figures before and after each")] = False,
    ) -> Response:
        await live.recalled()
        wanted = {"who": who, "source": source, "kind": kind}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        rows = [
            row
            for row in live.state.rows
            if all(getattr(row, name) == value for name, value in wanted.items())
            and (key is None or any(k == key or k.startswith(f"{key}.") for k in row.changes))
            and (since or 0.0) <= row.time < (until or INT64_MAX)
        ]
        view = history_view(live, rows[-limit:])
        if measured:
            figures = await effects.of(rows[-limit:])
            view = [{**each, "measured": figures.get(each["revision"])} for each in view]
        return json_response({"history": view, "more": len(rows) > limit})

    @router.get("/export")
    async def export_(
        format: FileFormat = "yaml",
        everything: Annotated[bool, Query(description="Also what is as by default")] = False,
    ) -> Response:
        heading = f"Settings of memd in force at revision {live.revision}"
        text = export(live.current, format, heading, everything)
        return json_response({"revision": live.revision, "format": format, "text": text})

    @router.get("/diff")
    async def diff() -> Response:
        said = await asyncio.to_thread(live.sources.read)
        file = live.sources.file
        return json_response(
            {
                "revision": live.revision,
                "file": None if file is None else str(file),
                "differences": live.state.differences(said),
            }
        )


def _add_changes(router: APIRouter, service: Service) -> None:
    live = service.live

    def answer(changes: dict[str, Any]) -> Response:
        view = settings_view(live, time.monotonic())
        kept = {name: view[name] for name in ("revision", "settings", "pending")}
        return json_response({**kept, "changes": changes})

    @router.patch("", openapi_extra=body_schema(SettingsChange))
    async def change(request: Request) -> Response:
        body = await read_body(request, SettingsChange, service.limits)
        author = Author(author_of(request.state.caller, body.who), body.reason, body.source)
        try:
            with _refusals():
                changes = await live.change(
                    body.changes,
                    body.revision,
                    author,
                    reset=body.reset,
                    persist=body.persist,
                    revert_after_seconds=body.revert_after_seconds,
                )
        except StaleRevision as error:
            more = {"revision": error.current}
            return _conflict(str(error), "stale_revision", "revision", more)
        return answer(changes)

    @router.post("/undo", openapi_extra=body_schema(SettingsUndo))
    async def undo(request: Request) -> Response:
        body = await read_body(request, SettingsUndo, service.limits)
        author = Author(author_of(request.state.caller, body.who), body.reason, body.source)
        try:
            with _refusals():
                return answer(await live.undo(author, body.revision))
        except CannotUndo as error:
            if error.code == "not_found":
                raise ApiError(404, str(error), error.code, "revision") from None
            return _conflict(str(error), error.code, "revision", {"conflicts": error.conflicts})

    @router.post("/confirm", openapi_extra=body_schema(SettingsConfirm))
    async def confirm(request: Request) -> Response:
        body = await read_body(request, SettingsConfirm, service.limits)
        with _refusals():
            author = Author(author_of(request.state.caller, body.who), "confirmed", body.source)
            await live.confirm(body.revision, author)
        return answer({})


def _add_preview(router: APIRouter, service: Service) -> None:
    live, engine = service.live, service.engine

    @router.post("/preview", openapi_extra=body_schema(SettingsPreview))
    async def preview(request: Request) -> Response:
        body = await read_body(request, SettingsPreview, service.limits)
        told = {"predicted": None, "predicted_reason": NO_PREDICTION}
        refused: dict[str, Any] = {"valid": False, "changes": {}, "effect": None, **told}
        try:
            proposed, changes = live.preview(body.changes, body.reset, body.persist)
        except SettingsError as error:
            return json_response({**refused, "problems": error.problems})
        except Unconfirmed as error:
            return json_response({**refused, "problems": {"pending": str(error)}})
        effect = None
        if engine.snapshot is not None and engine.ready is not None:
            try:
                effect = effect_view(engine.snapshot, engine.ready.pool, proposed, changes)
            except SettingsError as error:
                return json_response({**refused, "problems": error.problems})
        good = {"valid": True, "problems": {}, "changes": changes, "effect": effect}
        return json_response({**good, **told})


@contextmanager
def _refusals() -> Iterator[None]:
    """Errors of settings as those of the API."""
    try:
        yield
    except Unconfirmed as error:
        raise ApiError(409, str(error), "unconfirmed") from None
    except SavedError as error:
        raise ApiError(503, str(error), "not_saved") from None


def _conflict(message: str, code: str, param: str, more: Mapping[str, Any]) -> Response:
    body = {**error_body(message, 409, code, param), **more}
    return Response(msgspec.json.encode(body), 409, None, "application/json")
