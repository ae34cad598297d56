"""Around every request: its id, its time, its place in the metrics."""

import logging
import re
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memd.api.request_log import RequestLog
from memd.observe.metrics import Metrics

_SANE_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_ENDPOINTS = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
_UNCOUNTED = ("/health", "/health/live", "/health/ready", "/metrics", "/version")
_log = logging.getLogger(__name__)


def is_sane_id(value: str) -> bool:
    """Whether a client's request id can be echoed and logged."""
    return _SANE_ID.fullmatch(value) is not None


class Envelope:
    """ASGI middleware, outside of the application's own.

    Puts `request_id` (the client's when sane, else a new one) and `received_at` into the request's
    state; handlers may replace the id, and set `outcome` where the status does not tell it.

    Args:
        app: The application.
        metrics: Counts and times each request.
        log: Keeps what became of requests for text.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, log: RequestLog) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received_at = time.monotonic()
        state = scope.setdefault("state", {})
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        state["client_id"] = given if is_sane_id(given) else None
        state["request_id"] = state["client_id"] or f"req-{uuid.uuid4().hex}"
        state["received_at"] = received_at
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                took_ms = (time.monotonic() - received_at) * 1000
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", state["request_id"].encode()),
                    (b"openai-processing-ms", b"%d" % took_ms),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception:  # answered already, see errors.on_internal_error
            _log.exception("request %s failed", state["request_id"])
            state["outcome"] = "error"
        finally:
            self._count(scope["path"], state.get("outcome") or _outcome(status), state)

    def _count(self, path: str, outcome: str, state: dict[str, Any]) -> None:
        if path in _UNCOUNTED:
            return
        endpoint = _ENDPOINTS.get(path)
        if endpoint is None:
            endpoint = "models" if path.startswith("/v1/models") else "other"
            endpoint = "admin" if path.startswith("/admin/v1/") else endpoint
        self._metrics.requests[endpoint, outcome] += 1
        if endpoint in self._metrics.request_duration:
            took = time.monotonic() - state["received_at"]
            self._metrics.request_duration[endpoint].observe(took)
            self._log.add(endpoint, outcome, took, state)


def _outcome(status: int) -> str:
    if status in (401, 403):
        return "unauthorized"
    if status in (408, 504):
        return "timeout"
    if status in (429, 503):
        return "overloaded"
    if status >= 500:
        return "error"
    return "invalid" if status >= 400 else "ok" if status else "cancelled"
