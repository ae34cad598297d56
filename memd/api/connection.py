"""uvicorn as memd runs it: requests must arrive in time, with heads of a bounded size, and answers
must be read in time.

The limits are on the connection, so they hold for every route and whatever the client sends.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from memd.config import ServerSettings

MAX_HEAD_BYTES = 2**16  # of a request line and its headers, and of trailers
_EMPTY = b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_REQUEST_TIMEOUT = b"HTTP/1.1 408 Request Timeout" + _EMPTY
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large" + _EMPTY


class HttpServer(uvicorn.Server):
    """Serves an application; signals are left to the daemon.

    Args:
        app: The application.
        limits: Their timeouts are those of each connection.
    """

    def __init__(self, app: ASGIApp, limits: ServerSettings) -> None:
        super().__init__(
            _Config(
                app,
                limits,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


class _Config(uvicorn.Config):
    def __init__(self, app: ASGIApp, limits: ServerSettings, **options: Any) -> None:
        super().__init__(app, **options)
        self.limits = limits


class Connection(HttpToolsProtocol):
    """One client's connection.

    From the first moment, and from the first byte of each further request, the client has
    `request_timeout` to complete its request. Once it is behind in reading, it has `write_timeout`
    to catch up: then the connection is cut, which ends the request like any client that leaves.
    Where more than MAX_HEAD_BYTES come that are no body, the connection is closed. A client is
    behind when the buffers of the system are full and 64 KiB wait here, which is also
    the most that waits here.

    Args:
        config: With the limits.
        server_state: uvicorn's.
        app_state: Copied into each request's state.
        _loop: uvicorn's.
    """

    config: _Config

    def __init__(
        self,
        config: _Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._arriving: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._in_head = False  # of a request, and it has not come whole
        self._in_message = False
        self._bare_bytes = 0  # that have come since the message began, or since its last body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        for timer in (self._arriving, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has come, unless it is a head without end."""
        self._bare_bytes += len(data)
        super().data_received(data)
        if self._in_message and self._bare_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """A request begins to arrive."""
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._bare_bytes = 0
        self._expect()

    def on_headers_complete(self) -> None:
        """Its head has arrived."""
        if self._head_is_too_large():
            raise ValueError("the head is too large")  # ends the parser: see send_400_response
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of its body has arrived."""
        self._bare_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """It has arrived."""
        self._in_message = False
        super().on_message_complete()
        if self._arriving is not None:
            self._arriving.cancel()

    def _expect(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
        self._arriving = self.loop.call_later(self.config.limits.request_timeout, self._late)

    def _late(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # A request is being answered: the application times its body, and says so in JSON.
            self._expect()
            return
        if self._in_head:
            self.transport.write(_REQUEST_TIMEOUT)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request."""
        if self._in_head and self._head_is_too_large():
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def _head_is_too_large(self) -> bool:
        sizes = (len(name) + len(value) for name, value in self.headers)
        return len(self.url) + sum(sizes) > MAX_HEAD_BYTES

    def _refuse_head(self) -> None:
        if not self.transport.is_closing():
            if self._in_head:
                self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()

    def pause_writing(self) -> None:
        """The client is behind."""
        super().pause_writing()
        self._writing = self.loop.call_later(self.config.limits.write_timeout, self._cut)

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def _cut(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.scope["state"]["outcome"] = "timeout"
        self.transport.abort()
