"""The port between the api process and the engine: two queues of messages, over ZeroMQ or in
memory.

Both ends send lists of messages as one frame, so a step costs one message each way whatever it
carries.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from memd.engine.messages import FromEngine, ToEngine, Working

PULSE_SECONDS = 0.5
_encode = msgspec.msgpack.Encoder().encode
_decode_to_engine = msgspec.msgpack.Decoder(list[ToEngine]).decode
_decode_from_engine = msgspec.msgpack.Decoder(list[FromEngine]).decode


class EnginePort(Protocol):
    """The engine's end. Used by the engine thread only."""

    def receive(self, timeout_seconds: float) -> list[ToEngine]:
        """Messages that have arrived, in order; waits up to the timeout for the first."""

    def send(self, *messages: FromEngine) -> None:
        """Hand messages over without waiting for the reader."""


class ApiPort(Protocol):
    """The api process's end. Used on the event loop only."""

    def send(self, *messages: ToEngine) -> None:
        """Hand messages over without waiting for the engine."""

    async def receive(self) -> list[FromEngine]:
        """The next frame of messages, in order."""

    def close(self) -> None:
        """Drop the connection; a receive under way is cancelled by its owner."""


class Pulse:
    """Tells the other end from within a long step that it goes on, so that it is no hang.

    Args:
        port: The engine's end.
        clock: Monotonic seconds.
    """

    def __init__(self, port: EnginePort, clock: Callable[[], float] = time.monotonic) -> None:
        self._port = port
        self._clock = clock
        self._sent_at = clock()

    def beat(self) -> None:
        """Called whenever there is progress; sends something once in PULSE_SECONDS."""
        now = self._clock()
        if now - self._sent_at >= PULSE_SECONDS:
            self._sent_at = now
            self._port.send(Working())


class ZmqEnginePort:
    """The engine's end over a ZeroMQ pair socket that it connects."""

    def __init__(self, address: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(address)

    def receive(self, timeout_seconds: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        timeout_ms = max(0, int(timeout_seconds * 1000))
        while self._socket.poll(timeout_ms):
            messages += _decode_to_engine(self._socket.recv())
            timeout_ms = 0
        return messages

    def send(self, *messages: FromEngine) -> None:
        self._socket.send(_encode(messages))

    def close(self) -> None:
        self._socket.close()


class ZmqApiPort:
    """The api process's end over a ZeroMQ pair socket that it binds."""

    def __init__(self, address: str) -> None:
        context: zmq.asyncio.Context = zmq.asyncio.Context.instance()
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)

    def send(self, *messages: ToEngine) -> None:
        # Without a high-water mark a pair socket queues at once: nothing to await.
        self._socket.send(_encode(messages))

    async def receive(self) -> list[FromEngine]:
        return _decode_from_engine(await self._socket.recv())

    def close(self) -> None:
        self._socket.close()


class InlinePort:
    """Both ends in one process: the engine's end is `receive`/`send`, the other `post`/`take`.

    For tests and for programs that drive `Engine.step()` themselves. Not thread-safe. Messages pass
    through the same encoding as over ZeroMQ, so what works here works there.
    """

    def __init__(self) -> None:
        self._to_engine: deque[bytes] = deque()
        self._from_engine: deque[bytes] = deque()

    def receive(self, timeout_seconds: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while self._to_engine:
            messages += _decode_to_engine(self._to_engine.popleft())
        return messages

    def send(self, *messages: FromEngine) -> None:
        self._from_engine.append(_encode(messages))

    def post(self, *messages: ToEngine) -> None:
        self._to_engine.append(_encode(messages))

    def take(self) -> list[FromEngine]:
        messages: list[FromEngine] = []
        while self._from_engine:
            messages += _decode_from_engine(self._from_engine.popleft())
        return messages
