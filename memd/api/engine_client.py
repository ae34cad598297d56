"""The api process's view of the engine: open sequences, commands, and what it reported last.

Runs on the event loop only. Each accepted sequence ends in exactly one Output with a finish reason,
whatever becomes of the engine. Prompt, settings and tokens so far of an open sequence are kept
here.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from memd.api.errors import ApiError
from memd.engine.messages import (
    Abort,
    ApplySettings,
    Describe,
    EngineSnapshot,
    Failed,
    FromEngine,
    Loading,
    Output,
    PoolCommand,
    Preempt,
    Ready,
    Start,
    StepReport,
    Submit,
)
from memd.engine.port import ApiPort

Command = ApplySettings | Describe | PoolCommand | Preempt
State = Literal["loading", "ready", "draining", "failed"]
COMMAND_TIMEOUT_SECONDS = 10.0
STALL_SECONDS = 60.0


@dataclass
class OpenSequence:
    """One sequence under way."""

    submit: Submit
    outputs: "Outputs"
    opened_at: float  # monotonic
    token_ids: list[int] = field(default_factory=list)


class Outputs:
    """What the engine produces for the sequences of one request, in order of arrival."""

    def __init__(self, client: "EngineClient") -> None:
        self._client = client
        self._queue: asyncio.Queue[Output] = asyncio.Queue()

    def put(self, output: Output) -> None:
        """Called by the client as reports arrive."""
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


class EngineClient:
    """Owns the connection to the one engine.

    Args:
        port: The api's end of the port.
        clock: Monotonic seconds.
    """

    def __init__(self, port: ApiPort, clock: Callable[[], float] = time.monotonic) -> None:
        self._port = port
        self._clock = clock
        self._draining = False
        self._stage = "starting"
        self._progress = 0.0
        self._command_ids = count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._heard_at = clock()
        self.open: dict[str, OpenSequence] = {}
        self.ready: Ready | None = None
        self.failure: str | None = None
        self.snapshot: EngineSnapshot | None = None
        self.snapshot_at = time.time()
        self.settled = asyncio.Event()  # the engine is ready or has failed
        self.idle = asyncio.Event()  # no sequence is open
        self.idle.set()

    @property
    def state(self) -> State:
        """Of the daemon as a whole."""
        if self.failure is not None:
            return "failed"
        if self._draining:
            return "draining"
        return "ready" if self.ready is not None else "loading"

    @property
    def loading(self) -> tuple[str, float]:
        """Stage in words and progress within it, 0 to 1."""
        return self._stage, self._progress

    @property
    def stuck(self) -> bool:
        """Sequences are open and the engine has said nothing for STALL_SECONDS."""
        if not self.open:
            return False
        oldest = min(sequence.opened_at for sequence in self.open.values())
        return self._clock() - max(self._heard_at, oldest) > STALL_SECONDS

    def start(self, message: Start) -> None:
        """Tell the engine to load."""
        self._port.send(message)

    async def run(self) -> None:
        """Receive for ever; the daemon cancels it."""
        while True:
            for message in await self._port.receive():
                self._take(message)
            self._heard_at = self._clock()

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepReport():
                self._take_report(message)
            case Loading():
                self.set_stage(message.stage, message.progress)
            case Ready():
                self.ready = message
                self.settled.set()
            case Failed():
                self.fail(message.message)

    def _take_report(self, report: StepReport) -> None:
        if report.snapshot is not None:
            self.snapshot = report.snapshot
            self.snapshot_at = time.time()
        for output in report.outputs:
            sequence = self.open.get(output.request_id)
            if sequence is None:  # aborted here before the engine knew
                continue
            sequence.token_ids += output.token_ids
            if output.finish_reason is not None:
                self._close(output.request_id)
            sequence.outputs.put(output)
        for reply in report.replies:
            future = self._replies.pop(reply.command_id, None)
            if future is None or future.done():
                continue
            if reply.error is not None:
                future.set_exception(ApiError(409, reply.error, "refused"))
            else:
                future.set_result(reply.result or {})

    def set_stage(self, stage: str, progress: float) -> None:
        """What the start is doing now."""
        self._stage, self._progress = stage, progress

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    def fail(self, message: str) -> None:
        """The engine is gone: end every open sequence and waiting command with an error."""
        if self.failure is not None:
            return
        self.failure = message
        self.snapshot = None
        self.end_open("the engine stopped", "engine_failed")
        for future in self._replies.values():
            if not future.done():
                future.set_exception(ApiError(503, "the engine stopped", "engine_failed"))
        self._replies.clear()
        self.settled.set()

    def require_ready(self) -> Ready:
        """What the engine said when it was ready.

        Raises:
            ApiError: 503, loading, draining or failed.
        """
        if self.state == "ready" and self.ready is not None:
            return self.ready
        if self.state == "loading":
            stage, progress = self.loading
            raise ApiError(503, f"the model is loading: {stage}, {progress:.0%}", "loading")
        if self.state == "draining":
            raise ApiError(503, "the daemon is shutting down", "draining")
        raise ApiError(503, "the engine stopped", "engine_failed")

    @contextlib.contextmanager
    def generate(self, submits: Sequence[Submit]) -> Iterator[Outputs]:
        """Submit the sequences of a request; those not finished at the end are aborted.

        Raises:
            ApiError: 503, the daemon is not ready.
        """
        self.require_ready()
        outputs = Outputs(self)
        now = self._clock()
        for submit in submits:
            self.open[submit.request_id] = OpenSequence(submit, outputs, now)
        self.idle.clear()
        self._port.send(*submits)
        try:
            yield outputs
        finally:
            for submit in submits:
                self.abort(submit.request_id)

    def abort(self, sequence_id: str, reason: Literal["stop", "abort"] = "abort") -> None:
        """Forget a sequence and free what it holds in the engine; nothing if it has ended."""
        if sequence_id in self.open:
            self._close(sequence_id)
            self._port.send(Abort(sequence_id, reason))

    def _close(self, sequence_id: str) -> None:
        del self.open[sequence_id]
        if not self.open:
            self.idle.set()

    def end_open(self, message: str, code: str, request_id: str | None = None) -> int:
        """End open sequences with an error for the client.

        Args:
            message: For the client.
            code: Machine-readable.
            request_id: Only this sequence, or the sequences of this request.

        Returns:
            How many were ended.
        """
        chosen = list(self.open) if request_id is None else self.sequences_of(request_id)
        for name in chosen:
            outputs = self.open[name].outputs
            if self.failure is None:
                self.abort(name)
            else:
                self._close(name)
            outputs.put(Output(name, finish_reason="error", error=message, error_code=code))
        return len(chosen)

    def sequences_of(self, request_id: str) -> list[str]:
        """Ids of the open sequences of a request; the id of a sequence stands for itself."""
        return [
            name
            for name in self.open
            if name == request_id or name.rpartition("-")[0] == request_id
        ]

    async def command(
        self,
        kind: type[Command],
        timeout_seconds: float = COMMAND_TIMEOUT_SECONDS,
        **fields: Any,
    ) -> dict[str, Any]:
        """Send a command and wait for its reply.

        Args:
            kind: Which message.
            timeout_seconds: Then the engine counts as stuck; the command may still take effect.
            fields: Of the message, except its command id.

        Raises:
            ApiError: 409 the engine refused; 503 it is not there or does not answer.
        """
        if self.ready is None or self.failure is not None:
            self.require_ready()
        command_id = next(self._command_ids)
        future = asyncio.get_running_loop().create_future()
        self._replies[command_id] = future
        self._port.send(kind(command_id, **fields))
        try:
            async with asyncio.timeout(timeout_seconds):
                return await future  # type: ignore[no-any-return]
        except TimeoutError:
            raise ApiError(
                503, f"the engine did not answer in {timeout_seconds:g} s", "engine_timeout"
            ) from None
        finally:
            self._replies.pop(command_id, None)

    def age_seconds(self, sequence: OpenSequence) -> float:
        """Since it was submitted."""
        return self._clock() - sequence.opened_at
