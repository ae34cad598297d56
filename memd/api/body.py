"""Bodies in and out. A request body is limited as it arrives, parsed once, checked by a schema.

JSON is parsed by msgspec, which refuses what JSON does not know (NaN, broken UTF-8, lone
surrogates); the schema then sees plain data. Large bodies are parsed off the event loop, and
without what would hold the GIL for long there.
"""

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from memd.api.errors import ApiError, ClientGone, field_path
from memd.config import ServerSettings
from memd.errors import RequestError, requirement

Schema = TypeVar("Schema", bound=BaseModel)
_PARSE_INLINE_BYTES = 64 * 1024
_collecting = threading.Lock()  # held by whoever has switched garbage collection off
# What clients said to the model, or keep secret, is not repeated in errors: these are logged.
_PRIVATE = ("prompt", "messages", "tokens", "cache_salt", "chat_template_kwargs", "stop")


def body_schema(schema: type) -> dict[str, Any]:
    """The OpenAPI entry of a body that the route reads itself (see app.py)."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def json_response(data: object) -> Response:
    """200 with JSON."""
    return Response(msgspec.json.encode(data), media_type="application/json")


async def read_body(request: Request, schema: type[Schema], limits: ServerSettings) -> Schema:
    """The request's body as `schema`.

    Raises:
        ApiError: 413, the body is longer than `max_body`, or 408, it took longer than
            `request_timeout` to come; reading stops there.
        RequestError: not JSON, or a field is invalid; `param` names it.
        ClientGone: the client left before the body was complete.
    """
    try:
        async with asyncio.timeout(limits.request_timeout):
            body = await _receive(request, limits.max_body)
    except TimeoutError:
        raise ApiError(
            408,
            f"the request body did not arrive in {limits.request_timeout:g} s",
            "request_timeout",
            headers={"connection": "close"},
        ) from None
    if len(body) <= _PARSE_INLINE_BYTES:
        return _parse(body, schema)
    return await asyncio.to_thread(_parse_large, body, schema)


async def _receive(request: Request, limit_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(int(declared), limit_bytes)
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise _too_large(len(body), limit_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(size_bytes: int, limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the request body has {size_bytes} bytes or more, the limit is {limit_bytes} bytes",
        "request_too_large",
    )


def _parse(body: bytes, schema: type[Schema]) -> Schema:
    return _checked(_decode(body), schema)


def _parse_large(body: bytes, schema: type[Schema]) -> Schema:
    with _no_collection():
        data = _decode(body)
    return _checked(data, schema)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Before Python 3.12 each of a million new arrays would have the others looked at again."""
    with _collecting:
        gc.disable()
        try:
            yield
        finally:
            gc.enable()


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise RequestError("the request body is not valid JSON in UTF-8") from None


def _checked(data: Any, schema: type[Schema]) -> Schema:
    if not isinstance(data, dict):
        raise RequestError("the request body must be a JSON object")
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise _as_request_error(error) from None


def _as_request_error(error: ValidationError) -> RequestError:
    fault: Any = error.errors(include_url=False)[0]
    if fault["type"] == "request_error":  # raised by a schema's own check, see schemas.refuse
        return RequestError(fault["msg"], fault["ctx"]["param"], fault["ctx"]["code"] or None)
    param = field_path(fault["loc"])
    if fault["type"] == "missing":
        return RequestError(f"{param} is required", param)
    what = requirement(fault["msg"])
    if param.partition("[")[0] in _PRIVATE and isinstance(fault["input"], str):
        return RequestError(f"{param} {what}", param)
    return RequestError(f"{param} {what}, not {shown(fault['input'])}", param)


def shown(value: object) -> str:
    """A value of the client as JSON, cut short; containers by their kind only."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"an array of {len(value)}"
    if isinstance(value, int) and abs(value) >= 2**63:
        return str(value)[:60]
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:60] + "…"
