"""Streamed requests over raw sockets: bytes and their times are kept, and read when all is over.

A client that parses while it measures takes a large part of a small machine from the server it
measures; this one does nothing for a piece of a stream but append it to a buffer.
"""

import asyncio
import json
import ssl
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    """What became of one request. Times are monotonic seconds.

    Args:
        due_at: When it should have been sent; latencies count from here.
        sent_at: When it was.
        ended_at: When the connection closed.
        failure: None when the stream ended as it should, else in a word or two.
        token_times: When each event with a choice came.
        text: All of the answer's.
        prompt_tokens: As the server counts; None when it does not tell.
        completion_tokens: The same.
        cached_tokens: The same.
    """

    due_at: float
    sent_at: float
    ended_at: float = 0.0
    failure: str | None = None
    token_times: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _Recorder(asyncio.Protocol):
    """Keeps what arrives, and when, until the server closes."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.ends: list[int] = []  # offset after each piece
        self.times: list[float] = []
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.ends.append(len(self.received))
        self.times.append(time.monotonic())

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(error)


class Target:
    """A server that speaks OpenAI's API.

    Args:
        url: Such as `http://127.0.0.1:8733`; a path is put before the API's.
        api_key: Sent as a bearer token.
        timeout_seconds: Longest time a request may take.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_seconds: float = 600) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of a server")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._timeout_seconds = timeout_seconds

    async def stream(
        self,
        path: str,
        body: dict[str, Any],
        due_at: float | None = None,
        cut_after_seconds: float | None = None,
    ) -> Answer:
        """Send a request and read its stream to the end.

        Args:
            path: Such as `/v1/completions`.
            body: With `stream` true.
            due_at: Monotonic; default: now.
            cut_after_seconds: Hang up then, if the stream has not ended.
        """
        answer = Answer(due_at or time.monotonic(), time.monotonic())
        recorder, failure = None, None
        try:
            async with asyncio.timeout(self._timeout_seconds):
                transport, recorder = await asyncio.get_running_loop().create_connection(
                    _Recorder, self._host, self._port, ssl=self._tls
                )
                try:
                    transport.write(self._request("POST", path, json.dumps(body).encode()))
                    async with asyncio.timeout(cut_after_seconds) as cut:
                        await recorder.closed
                finally:
                    transport.abort()
        except TimeoutError:
            failure = "cut" if recorder is not None and cut.expired() else "timeout"
        except OSError as error:
            failure = f"{type(error).__name__}"
        answer.ended_at = time.monotonic()
        if recorder is not None:
            _read(recorder, answer)
        answer.failure = failure or answer.failure
        return answer

    async def get(self, path: str) -> Any:
        """The JSON at a path. Raises OSError or ValueError."""
        transport, recorder = await asyncio.get_running_loop().create_connection(
            _Recorder, self._host, self._port, ssl=self._tls
        )
        transport.write(self._request("GET", path, b""))
        await recorder.closed
        status, payload, _ = _dechunked(bytes(recorder.received))
        if status != 200:
            raise ValueError(f"GET {path} answered {status}: {payload[:200]!r}")
        return json.loads(payload)

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        head = (
            f"{method} {self._root}{path} HTTP/1.1\r\nhost: {self._host}\r\nconnection: close\r\n"
            f"{self._key}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def _dechunked(received: bytes) -> tuple[int, bytes, list[tuple[int, int]]]:
    """Take an answer apart.

    Returns:
        Status, 0 when there is none; the payload; for each of its pieces where it ends in the
        payload, and where in `received`.
    """
    head, found, _ = received.partition(b"\r\n\r\n")
    if not found:
        return 0, b"", []
    status, at = int(head.split(b" ", 2)[1]), len(head) + 4
    if b"transfer-encoding: chunked" not in head.lower():
        return status, received[at:], [(len(received) - at, len(received))]
    payload, pieces = bytearray(), []
    while (line_end := received.find(b"\r\n", at)) >= 0:
        size = int(received[at:line_end].split(b";")[0] or b"0", 16)
        if size == 0 or line_end + 2 + size > len(received):
            break
        payload += received[line_end + 2 : line_end + 2 + size]
        at = line_end + 2 + size + 2
        pieces.append((len(payload), at - 2))
    return status, bytes(payload), pieces


def _read(recorder: _Recorder, answer: Answer) -> None:
    status, payload, pieces = _dechunked(bytes(recorder.received))
    if status != 200:
        answer.failure = f"http {status}" if status else "no answer"
        return
    ends = [end for end, _ in pieces]
    done, at = False, 0
    for event in payload.split(b"\n\n"):
        at += len(event) + 2
        if not event.startswith(b"data: "):
            continue
        if event == b"data: [DONE]":
            done = True
            continue
        piece = pieces[min(bisect_left(ends, at), len(pieces) - 1)][1]
        came_at = recorder.times[min(bisect_left(recorder.ends, piece), len(recorder.times) - 1)]
        try:
            _take(json.loads(event[6:]), came_at, answer)
        except ValueError:  # the connection was cut within it
            break
    if not done and answer.failure is None:
        answer.failure = "ended early"


def _take(event: dict[str, Any], came_at: float, answer: Answer) -> None:
    if "error" in event:
        answer.failure = f"error {event['error'].get('code')}"
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens")
    for choice in event.get("choices", ()):
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        if text or choice.get("finish_reason"):
            answer.token_times.append(came_at)
            answer.text += text
