"""Responses that notice at once when their client leaves."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from memd.api.errors import ClientGone

Result = TypeVar("Result")

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`, unless the client leaves first; then it is cancelled.

    The request's body must have been read.

    Raises:
        ClientGone: the client left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends server-sent events. An error before the first one becomes an ordinary error response.

    Args:
        events: Encoded events; closed when the client leaves.
    """

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events or the client end."""
        try:
            await while_connected(receive, self._send(send))
        except ClientGone:
            scope["state"].setdefault("outcome", "cancelled")

    async def _send(self, send: Send) -> None:
        started = False
        async with contextlib.aclosing(self._events):
            async for event in self._events:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
