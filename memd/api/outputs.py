"""Outputs of the engine on their way to the reader of one request."""

import asyncio
from typing import TYPE_CHECKING

from memd.engine.messages import Output

if TYPE_CHECKING:
    from memd.api.engine_client import EngineClient

MAX_UNREAD = 4096  # outputs of each sequence


class Outputs:
    """What the engine produces for the sequences of one request, in order of arrival.

    A sequence whose reader is too far behind ends with an error, so that what waits is bounded.

    Args:
        client: Knows the sequences.
        sequences: How many there are.
    """

    def __init__(self, client: "EngineClient", sequences: int) -> None:
        self._client = client
        self._limit = MAX_UNREAD * sequences
        self._queue: asyncio.Queue[Output] = asyncio.Queue()

    def put(self, output: Output) -> None:
        """Called by the client as reports arrive."""
        if output.finish_reason is None and self._queue.qsize() >= self._limit:
            self._client.end_open("the answer is read too slowly", "slow_reader", output.request_id)
        else:
            self._queue.put_nowait(output)

    async def next(self, timeout_seconds: float | None = None) -> Output:
        """The next output. Raises TimeoutError."""
        if not self._queue.empty():
            return self._queue.get_nowait()
        async with asyncio.timeout(timeout_seconds):
            return await self._queue.get()

    def stop(self, sequence_id: str) -> None:
        """A stop string is complete: the engine need not go on."""
        self._client.abort(sequence_id, "stop")
