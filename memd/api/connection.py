"""uvicorn as memd runs it: requests must arrive in time, and answers must be read in time.

Both limits are on the connection, so they hold for every route and whatever the client sends.
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

_REQUEST_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


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
    A client is behind when the buffers of the system are full and 64 KiB wait here, which is also
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

    def on_message_begin(self) -> None:
        """A request begins to arrive."""
        super().on_message_begin()
        self._in_head = True
        self._expect()

    def on_headers_complete(self) -> None:
        """Its head has arrived."""
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """It has arrived."""
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
