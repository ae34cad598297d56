"""Errors as clients see them: OpenAI's `{"error": {message, type, param, code}}`, everywhere."""

from collections.abc import Mapping

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from memd.errors import RequestError, SettingsError, requirement
from memd.store.errors import StoreError

_TYPES = {401: "invalid_request_error", 429: "rate_limit_error"}
_RETRY_AFTER_SECONDS = {
    "loading": "2",
    "restarting": "1",
    "draining": "10",
    "pool_exhausted": "2",
    "history_unavailable": "5",
}


class ApiError(Exception):
    """An answer other than 200.

    Args:
        status: HTTP status.
        message: What is wrong, in words for the client.
        code: Machine-readable, or None.
        param: The field at fault, or None.
        headers: Of the answer, beside the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


def error_body(
    message: str, status: int, code: str | None = None, param: str | None = None
) -> dict[str, object]:
    """The error object, without envelope or secrets."""
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: ApiError) -> Response:
    """A JSON response; a passing lack says when to come back."""
    headers = dict(error.headers)
    if error.status == 503:
        headers["x-should-retry"] = "true" if error.code in _RETRY_AFTER_SECONDS else "false"
        if error.code in _RETRY_AFTER_SECONDS:
            headers["retry-after"] = _RETRY_AFTER_SECONDS[error.code]
    body = error_body(error.message, error.status, error.code, error.param)
    return Response(msgspec.json.encode(body), error.status, headers, "application/json")


def field_path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content") -> "messages[0].content"."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


async def on_error(request: Request, error: Exception) -> Response:
    """The one handler of every error raised on purpose."""
    return error_response(_as_api_error(request, error))


async def on_internal_error(request: Request, _: Exception) -> Response:
    """For errors nobody expected: an id to look for in the log, and nothing else."""
    message = f"internal error, request {request.state.request_id}"
    return error_response(ApiError(500, message, "internal_error"))


async def on_client_gone(request: Request, _: Exception) -> Response:
    """Nobody reads this; the status is nginx's, for the log."""
    request.scope["state"].setdefault(
        "outcome", "cancelled"
    )  # or it was cut off, see connection.py
    return Response(status_code=499)


def _as_api_error(request: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, error.message, error.code, error.param)
    if isinstance(error, SettingsError):
        return ApiError(400, str(error), "invalid_settings", ", ".join(error.problems))
    if isinstance(error, StoreError):
        return ApiError(503, str(error), "history_unavailable")
    if isinstance(error, RequestValidationError):
        fault = error.errors()[0]
        param = field_path(tuple(fault["loc"][1:]))
        what = f"{param} {requirement(fault['msg'])}, not {fault['input']!r}"
        return ApiError(400, what[:300], None, param)
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status in (404, 405):
        what = "is not served here" if status == 404 else "does not take this method"
        message = f"{request.method} {request.url.path[:200]} {what}"
        allowed = error.headers if isinstance(error, HTTPException) else None
        return ApiError(status, message, "not_found", headers=allowed)
    return ApiError(status, "the request cannot be answered", None)


HANDLED = (
    *(ApiError, RequestError, SettingsError, StoreError),
    *(RequestValidationError, HTTPException),
)
