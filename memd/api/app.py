"""The ASGI application: all routes, one form of error, and the envelope around each request."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp

from memd import __version__
from memd.api.admin import admin_routes
from memd.api.auth import OPEN_PATHS, Authentication
from memd.api.envelope import Envelope
from memd.api.errors import HANDLED, ClientGone, on_client_gone, on_error, on_internal_error
from memd.api.health import health_routes
from memd.api.openai import openai_routes
from memd.api.request_log import RequestLog
from memd.api.schemas import SCHEMAS
from memd.api.schemas_admin import ADMIN_SCHEMAS
from memd.api.schemas_pool import POOL_SCHEMAS
from memd.api.schemas_settings import SETTINGS_SCHEMAS
from memd.api.schemas_traces import TRACE_SCHEMAS
from memd.api.service import Service


def create_app(service: Service) -> ASGIApp:
    """The whole HTTP side of one daemon."""
    app = FastAPI(
        title="memd", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None
    )
    for kind in HANDLED:
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(ClientGone, on_client_gone)
    app.add_exception_handler(Exception, on_internal_error)
    app.include_router(health_routes(service))
    app.include_router(openai_routes(service))
    app.include_router(admin_routes(service))
    secured = service.keys is not None
    app.openapi = lambda: _openapi(app, secured)  # type: ignore[method-assign]
    return Envelope(Authentication(app, service.keys), service.metrics, RequestLog(service))


def _openapi(app: FastAPI, secured: bool) -> dict[str, Any]:
    """FastAPI's document, with the schemas of the bodies that routes read themselves.

    Args:
        app: The application.
        secured: Whether API keys are asked for.
    """
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    bodies = (*SCHEMAS, *ADMIN_SCHEMAS, *SETTINGS_SCHEMAS, *POOL_SCHEMAS, *TRACE_SCHEMAS)
    _, definitions = models_json_schema(
        [(schema, "validation") for schema in bodies],
        ref_template="#/components/schemas/{model}",
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= definitions["$defs"]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if secured:
                operation["security"] = [] if path in OPEN_PATHS else [{"key": []}]
    if secured:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document
