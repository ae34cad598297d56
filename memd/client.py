"""A client of a running memd: the admin API, and the OpenAI API with streaming.

The command line and the dashboard go through it; neither speaks HTTP itself. Answers are the
daemon's JSON as it came. Not thread-safe; one client a thread.
"""

import json
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx2

from memd.errors import MemdError

JSON = dict[str, Any]

DEFAULT_URL = "http://127.0.0.1:8733"
_UNIX = "unix://"


class ClientError(MemdError):
    """The daemon answered with an error, or with something that is not memd's.

    Args:
        message: The daemon's words.
        status: HTTP status; None when the error came inside a stream, or not from memd.
        code: Machine-readable code of the error body, or None.
        param: The field at fault, or None.
    """

    def __init__(
        self,
        message: str,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param


class Unreachable(ClientError):
    """No daemon answers at the address, or the connection broke."""


class Client:
    """Calls one daemon. Use as a context manager, or call `close`.

    Proxies named by the environment are not used: the daemon is on this machine or on its network.

    Args:
        base_url: Such as `http://127.0.0.1:8733` or `unix:///run/memd.sock`.
        api_key: Where the daemon asks for one.
        transport: How bytes get there; default: as `base_url` says.
        timeout_seconds: Longest silence of the daemon, except while it generates.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        transport: httpx2.BaseTransport | None = None,
        timeout_seconds: float = 30.0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        # Reading the certificate store takes 60 ms, which plain HTTP has no use for.
        tls = self.base_url.startswith("https:")
        uds = self.base_url.removeprefix(_UNIX) if self.base_url.startswith(_UNIX) else None
        self._root = self.base_url if uds is None else "http://memd"
        self._http = httpx2.Client(
            transport=transport or httpx2.HTTPTransport(verify=tls, uds=uds),
            timeout=timeout_seconds,
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
        )
        self._generation_timeout = httpx2.Timeout(timeout_seconds, read=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connections."""
        self._http.close()

    def version(self) -> JSON:
        """Name and version of whatever listens; the way to tell that it is memd."""
        return self._call("GET", "/version")

    def readiness(self) -> JSON:
        """`status` and, while loading, `stage` and `progress`. Not being ready is no error here."""
        response = self._request("GET", "/health/ready")
        return _body(response) if response.status_code == 503 else _checked(response)

    def status(self) -> JSON:
        """State, model, settings revision and a summary of requests and pool."""
        return self._call("GET", "/admin/v1/status")

    def pool(self) -> JSON:
        """Layout and counts of the pool."""
        return self._call("GET", "/admin/v1/pool")

    def blocks(self, offset: int = 0, limit: int = 1000) -> JSON:
        """What each block holds."""
        return self._call("GET", "/admin/v1/pool/blocks", query={"offset": offset, "limit": limit})

    def prefixes(self, limit: int = 100) -> JSON:
        """The cached prefixes."""
        return self._call("GET", "/admin/v1/prefixes", query={"limit": limit})

    def reclaim(self, pages: int | None = None) -> JSON:
        """Evict that many cached pages, or down to the low mark."""
        return self._call(
            "POST", "/admin/v1/pool/reclaim", {} if pages is None else {"pages": pages}
        )

    def flush(self) -> JSON:
        """Evict every cached page."""
        return self._call("POST", "/admin/v1/pool/flush", {})

    def audit(self) -> JSON:
        """Recount the pool and repair leaks."""
        return self._call("POST", "/admin/v1/pool/audit", {})

    def requests(self) -> JSON:
        """The open requests."""
        return self._call("GET", "/admin/v1/requests")

    def request(self, request_id: str) -> JSON:
        """One open request."""
        return self._call("GET", f"/admin/v1/requests/{quote(request_id, safe='')}")

    def cancel(self, request_id: str) -> JSON:
        """End a request for its client."""
        return self._call("DELETE", f"/admin/v1/requests/{quote(request_id, safe='')}")

    def settings(self) -> JSON:
        """`revision`, the whole tree as `settings`, and the `live` keys."""
        return self._call("GET", "/admin/v1/settings")

    def change_settings(
        self, revision: int, reason: str, changes: Mapping[str, Any], who: str | None = None
    ) -> JSON:
        """Apply changes, all or none, if `revision` is still the current one.

        Args:
            revision: What the changes are based on.
            reason: Recorded, as is `who`.
            changes: Values by dotted key.
            who: Default: what the daemon calls a local caller.

        Raises:
            ClientError: 409 when the revision is stale, 400 when a key or value is refused.
        """
        body = {"revision": revision, "reason": reason, "changes": dict(changes), "who": who}
        return self._call("PATCH", "/admin/v1/settings", body)

    def preview_settings(self, changes: Mapping[str, Any]) -> JSON:
        """What changes would do. Nothing is applied."""
        return self._call("POST", "/admin/v1/settings/preview", {"changes": dict(changes)})

    def undo_settings(self, reason: str, who: str | None = None) -> JSON:
        """Take back the latest change that is not yet taken back."""
        return self._call("POST", "/admin/v1/settings/undo", {"reason": reason, "who": who})

    def settings_history(self) -> JSON:
        """The revisions, with who, when and why."""
        return self._call("GET", "/admin/v1/settings/history")

    def faults(self) -> JSON:
        """The faults `armed`, and how often each kind was `injected` in the engine of now."""
        return self._call("GET", "/admin/v1/debug/faults")

    def arm_faults(self, plan: Mapping[str, Any]) -> JSON:
        """Replace the faults that are armed; an empty plan disarms all.

        Raises:
            ClientError: 409 when the daemon runs without `debug.faults`.
        """
        return self._call("PUT", "/admin/v1/debug/faults", plan)

    def models(self) -> JSON:
        """The served models, as OpenAI lists them."""
        return self._call("GET", "/v1/models")

    def complete(self, body: Mapping[str, Any]) -> JSON:
        """`POST /v1/completions`, answered whole."""
        return self._call("POST", "/v1/completions", {**body, "stream": False}, generates=True)

    def chat(self, body: Mapping[str, Any]) -> JSON:
        """`POST /v1/chat/completions`, answered whole."""
        return self._call("POST", "/v1/chat/completions", {**body, "stream": False}, generates=True)

    def stream_complete(self, body: Mapping[str, Any]) -> Iterator[JSON]:
        """`POST /v1/completions`, chunk by chunk; the last one carries `usage`."""
        return self._stream("/v1/completions", body)

    def stream_chat(self, body: Mapping[str, Any]) -> Iterator[JSON]:
        """`POST /v1/chat/completions`, chunk by chunk; the last one carries `usage`.

        Closing the iterator hangs up, which ends the request in the daemon.
        """
        return self._stream("/v1/chat/completions", body)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, int] | None = None,
        generates: bool = False,
    ) -> JSON:
        return _checked(self._request(method, path, body, query, generates))

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, int] | None = None,
        generates: bool = False,
    ) -> httpx2.Response:
        timeout = self._generation_timeout if generates else httpx2.USE_CLIENT_DEFAULT
        try:
            return self._http.request(
                method, self._root + path, json=body, params=query, timeout=timeout
            )
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            raise self._unreachable(error) from None

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[JSON]:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._http.stream(
                "POST", self._root + path, json=body, timeout=self._generation_timeout
            ) as response:
                if response.is_error:
                    response.read()
                    raise _error(response)
                for event in httpx2.EventSource(response):
                    if event.data == "[DONE]":
                        return
                    chunk: JSON = json.loads(event.data)
                    if "error" in chunk:
                        fault = chunk["error"]
                        raise ClientError(fault["message"], None, fault.get("code"))
                    yield chunk
        except httpx2.TransportError as error:
            raise self._unreachable(error) from None
        raise Unreachable(f"{self.base_url} ended the stream before [DONE]")

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(f"cannot reach a daemon at {self.base_url}: {error}")


def _checked(response: httpx2.Response) -> JSON:
    if response.is_error:
        raise _error(response)
    return _body(response)


def _body(response: httpx2.Response) -> JSON:
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise _not_memd(response)
    return body


def _error(response: httpx2.Response) -> ClientError:
    fault = _body(response).get("error")
    if not isinstance(fault, dict) or not isinstance(fault.get("message"), str):
        return _not_memd(response)
    return ClientError(
        fault["message"], response.status_code, fault.get("code"), fault.get("param")
    )


def _not_memd(response: httpx2.Response) -> ClientError:
    return ClientError(
        f"{response.url} answered {response.status_code}, but not as memd does: what listens there?"
    )
