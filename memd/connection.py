"""HTTP to one daemon: addresses, keys, errors and streams. For memd.client only."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2

from memd.errors import MemdError

JSON = dict[str, Any]

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


class Connection:
    """Speaks with one daemon. Not thread-safe.

    Args:
        base_url: Such as `http://127.0.0.1:8733` or `unix:///run/memd.sock`.
        api_key: Where the daemon asks for one.
        transport: How bytes get there; None: as `base_url` says.
        timeout_seconds: Longest silence of the daemon, except while it generates.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        transport: httpx2.BaseTransport | None,
        timeout_seconds: float,
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

    def close(self) -> None:
        """Drop the connections."""
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        generates: bool = False,
    ) -> JSON:
        """The JSON of an answer that is no error. Raises ClientError."""
        return checked(self.request(method, path, body, query, generates))

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        generates: bool = False,
    ) -> httpx2.Response:
        """Any answer. Raises Unreachable."""
        timeout = self._generation_timeout if generates else httpx2.USE_CLIENT_DEFAULT
        given = {name: value for name, value in (query or {}).items() if value is not None}
        try:
            return self._http.request(
                method, self._root + path, json=body, params=given, timeout=timeout
            )
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            raise self._unreachable(error) from None

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[JSON]:
        """The chunks of a generation. Raises ClientError."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._http.stream(
                "POST", self._root + path, json=body, timeout=self._generation_timeout
            ) as response:
                if response.is_error:
                    response.read()
                    raise error_of(response)
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

    def download(self, path: str) -> Iterator[bytes]:
        """An answer piece by piece, whatever it is made of. Raises ClientError."""
        try:
            with self._http.stream("GET", self._root + path) as response:
                if response.is_error:
                    response.read()
                    raise error_of(response)
                yield from response.iter_bytes()
        except httpx2.TransportError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(f"cannot reach a daemon at {self.base_url}: {error}")


def checked(response: httpx2.Response) -> JSON:
    """The JSON of an answer. Raises ClientError when it is an error, or not memd's."""
    if response.is_error:
        raise error_of(response)
    return json_of(response)


def json_of(response: httpx2.Response) -> JSON:
    """The JSON of any answer. Raises ClientError when there is none."""
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise _not_memd(response)
    return body


def error_of(response: httpx2.Response) -> ClientError:
    """An error that the daemon answered."""
    fault = json_of(response).get("error")
    if not isinstance(fault, dict) or not isinstance(fault.get("message"), str):
        return _not_memd(response)
    return ClientError(
        fault["message"], response.status_code, fault.get("code"), fault.get("param")
    )


def _not_memd(response: httpx2.Response) -> ClientError:
    return ClientError(
        f"{response.url} answered {response.status_code}, but not as memd does: what listens there?"
    )
