"""Tenants over HTTP: what each has and may have. Changes are changes of the setting `tenants`."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from memd.api.auth import author_of
from memd.api.body import body_schema, json_response, read_body, shown
from memd.api.errors import ApiError
from memd.api.schemas import answers
from memd.api.schemas_pool import TenantRemoval, TenantRequest
from memd.api.service import Service
from memd.config_operator import TenantSettings
from memd.engine.snapshot_types import TenantSnapshot
from memd.errors import RequestError, SettingsError, requirement
from memd.settings_saved import SavedError
from memd.settings_state import Author, StaleRevision, Unconfirmed


def tenant_routes(service: Service) -> APIRouter:
    """The routes under /tenants."""
    router = APIRouter(prefix="/tenants")
    live = service.live
    changes = answers(400, 404, 408, 409, 413)

    @router.get("")
    async def tenants() -> Response:
        return json_response({"tenants": _rows(service), "revision": live.revision})

    @router.get("/{name}", responses=answers(404))
    async def tenant(name: str) -> Response:
        return json_response(_row(service, name))

    @router.put("/{name}", openapi_extra=body_schema(TenantRequest), responses=changes)
    async def put(request: Request, name: str) -> Response:
        body = await read_body(request, TenantRequest, service.limits)
        others = [each for each in _configured(service) if each["name"] != name]
        wanted = _checked(name, body)
        await _change(service, request, [*others, wanted], body, body.revision)
        return json_response({**_row(service, name), "revision": live.revision})

    @router.delete("/{name}", openapi_extra=body_schema(TenantRemoval), responses=changes)
    async def delete(request: Request, name: str) -> Response:
        body = await read_body(request, TenantRemoval, service.limits)
        others = [each for each in _configured(service) if each["name"] != name]
        if len(others) == len(live.current.tenants):
            raise ApiError(404, f"no tenant {name[:64]!r} is set up", "not_found")
        await _change(service, request, others, body, None)
        return json_response({"name": name, "revision": live.revision})

    return router


def _checked(name: str, body: TenantRequest) -> dict[str, Any]:
    """A tenant as the setting has it. Raises RequestError, which names the field."""
    try:
        tenant = TenantSettings(name=name, quota=body.quota, weight=body.weight)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        field, message = str(fault["loc"][0]), requirement(fault["msg"])
        if fault["type"] != "value_error":
            message = f"{message}, not {shown(fault['input'])}"
        raise RequestError(f"{field}: {message}", field) from None
    return tenant.model_dump(mode="json")


async def _change(
    service: Service,
    request: Request,
    tenants: list[dict[str, Any]],
    body: TenantRequest | TenantRemoval,
    revision: int | None,
) -> None:
    live = service.live
    author = Author(author_of(request.state.caller, body.who), body.reason, body.source)
    try:
        await live.change(
            {"tenants": tenants},
            live.revision if revision is None else revision,
            author,
            persist=body.persist,
        )
    except StaleRevision as error:
        raise ApiError(409, str(error), "stale_revision", "revision") from None
    except Unconfirmed as error:
        raise ApiError(409, str(error), "unconfirmed") from None
    except SavedError as error:
        raise ApiError(503, str(error), "not_saved") from None
    except SettingsError as error:
        raise RequestError("; ".join(error.problems.values()), "name") from None


def _configured(service: Service) -> list[dict[str, Any]]:
    return [tenant.model_dump(mode="json") for tenant in service.live.current.tenants]


def _rows(service: Service) -> list[dict[str, Any]]:
    """Tenants that are set up, then others that the engine knows; the nameless one is ""."""
    snapshot, ready = service.engine.snapshot, service.engine.ready
    seen = snapshot.tenants if snapshot is not None else {}
    settings = {tenant.name: tenant for tenant in service.live.current.tenants}
    page_bytes = ready.pool["page_bytes"] if ready is not None else None
    rejections = service.admission.rejections
    return [
        _shown(name, settings.get(name), seen.get(name), page_bytes, rejections.of(name))
        for name in dict.fromkeys([*settings, *sorted(seen)])
    ]


def _row(service: Service, name: str) -> dict[str, Any]:
    found = next((row for row in _rows(service) if row["name"] == name), None)
    if found is None:
        raise ApiError(404, f"no tenant {name[:64]!r} is set up or known", "not_found")
    return found


def _shown(
    name: str,
    settings: TenantSettings | None,
    seen: TenantSnapshot | None,
    page_bytes: int | None,
    rejections: Mapping[str, int],
) -> dict[str, Any]:
    """One tenant; what the engine has not told is None. Its counts start with the engine."""

    def size(pages: int | None) -> int | None:
        return None if pages is None or page_bytes is None else pages * page_bytes

    return {
        "name": name,
        "configured": settings is not None,
        "quota": settings.quota if settings is not None else None,
        "weight": settings.weight if settings is not None else 1.0,
        "quota_bytes": size(seen.quota_pages) if seen is not None else None,
        "used_bytes": size(seen.used_pages) if seen is not None else None,
        "pinned_bytes": size(seen.pinned_pages) if seen is not None else None,
        "running": seen.running if seen is not None else None,
        "waiting": seen.waiting if seen is not None else None,
        "computed_tokens": seen.computed_tokens if seen is not None else None,
        "rejections": sum(rejections.values()),
        "rejections_by_reason": dict(rejections),
    }
