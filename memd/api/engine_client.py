"""The api process's view of the engine: open sequences, commands, and what it reported last.

Runs on the event loop only. Each accepted sequence ends in exactly one Output with a finish reason,
whatever becomes of the engine: prompt, sampling and tokens so far of an open sequence are kept
here, and the next engine goes on from them.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Literal

from memd.api.errors import ApiError
from memd.api.outputs import Outputs
from memd.api.recovery import (
    MAX_DEATHS,
    Life,
    OpenSequence,
    SequenceWatcher,
    Trial,
    with_limit,
)
from memd.engine.messages import (
    Abort,
    ApplySettings,
    ArmFaults,
    Describe,
    Explain,
    Failed,
    FromEngine,
    Loading,
    Output,
    PoolCommand,
    Preempt,
    PrefixCommand,
    Ready,
    SetPriority,
    Shutdown,
    Start,
    StepReport,
    Submit,
    ToEngine,
)
from memd.engine.port import ApiPort
from memd.engine.snapshot_types import EngineSnapshot
from memd.faults import FaultPlan
from memd.types import FinishReason

Command = (
    ApplySettings
    | ArmFaults
    | Describe
    | Explain
    | PoolCommand
    | Preempt
    | PrefixCommand
    | SetPriority
)
State = Literal["loading", "ready", "restarting", "draining", "failed"]
COMMAND_TIMEOUT_SECONDS = 10.0


OnEvent = Callable[[str, str, dict[str, Any]], None]  # kind, message, details


class EngineClient:
    """Owns the connection to the one engine, and what has to outlive it.

    Args:
        port: The api's end of the port to the first engine; None: it is still to be connected.
        clock: Monotonic seconds.
    """

    def __init__(
        self, port: ApiPort | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._port = port
        self._clock = clock
        self._draining = False
        self._stage = "starting"
        self._progress = 0.0
        self._command_ids = count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._trial = Trial()
        self.open: dict[str, OpenSequence] = {}  # in order of arrival
        self.ended = 0  # sequences that were open once
        self.ready: Ready | None = None
        self.failure: str | None = None
        self.restarts: dict[str, int] = {"killed": 0, "crashed": 0, "hung": 0}
        self.snapshot: EngineSnapshot | None = None
        self.snapshot_at = time.time()
        self.settled = asyncio.Event()  # the engine has been ready, or has failed
        self.idle = asyncio.Event()  # no sequence is open
        self.idle.set()
        self.life = Life()
        self.faults = FaultPlan()  # armed in each engine
        self.on_event: OnEvent = lambda kind, message, details: None
        self.watcher: SequenceWatcher | None = None

    @property
    def state(self) -> State:
        """Of the daemon as a whole."""
        if self.failure is not None:
            return "failed"
        if self._draining:
            return "draining"
        if self.ready is not None:
            return "ready"
        return "restarting" if self.settled.is_set() else "loading"

    @property
    def loading(self) -> tuple[str, float]:
        """Stage in words and progress within it, 0 to 1."""
        return self._stage, self._progress

    def connect(self, port: ApiPort) -> None:
        """A new engine is to come at the other end of this port."""
        self._port = port
        self.life = Life()

    def start(self, message: Start) -> None:
        """Tell the engine to load."""
        self._send(message)
        self.life.started = True

    def shut_down(self) -> None:
        """Tell the engine to end."""
        self._send(Shutdown())

    async def run(self) -> None:
        """Receive from the engine of now for ever; its supervisor cancels it."""
        assert self._port is not None
        while True:
            for message in await self._port.receive():
                self._take(message)

    def _send(self, *messages: ToEngine) -> None:
        assert self._port is not None  # there is nothing to tell before there is an engine
        self._port.send(*messages)

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepReport():
                self._take_report(message)
                return
            case Loading():
                self.set_stage(message.stage, message.progress)
            case Ready():
                self.life.ready = message
                self.life.ready_at = self._clock()
                if self.faults.armed():
                    self._send(ArmFaults(next(self._command_ids), self.faults))
                self._resume()
            case Failed():
                self.life.last_words = message.message
                if not self.settled.is_set():
                    self.fail(message.message)
        self.life.signs += 1

    def _take_report(self, report: StepReport) -> None:
        if report.snapshot is not None:
            self.snapshot = report.snapshot
            self.snapshot_at = time.time()
            steps = sum(report.snapshot.steps.values())
            # An engine that has work and makes no step hangs, however much it talks.
            self.life.signs += steps != self.life.steps or not self.open
            self.life.steps = steps
            self.ready = with_limit(self.ready, report.snapshot)
        for event in report.events:
            self.on_event(event.kind, event.message, event.details)
        for output in report.outputs:
            sequence = self.open.get(output.request_id)
            if sequence is None:  # aborted here before the engine knew
                continue
            if output.token_ids and sequence.first_token_at is None:
                sequence.first_token_at = self._clock()
            sequence.take(output)
            if output.finish_reason is not None:
                self._close(output.request_id, output.finish_reason)
        for reply in report.replies:
            future = self._replies.pop(reply.command_id, None)
            if future is None or future.done():
                continue
            if reply.error is not None:
                future.set_exception(ApiError(409, reply.error, "refused"))
            else:
                future.set_result(reply.result or {})
        if self.ready is None:
            blocked = report.snapshot is not None and any(report.snapshot.waiting.values())
            self._try_suspects(blocked)

    def _resume(self) -> None:
        """Hand what is open to a new engine: suspects first and one by one, then all others."""
        self._trial = Trial([each for each in self.open.values() if each.suspect])
        self._try_suspects()

    def _try_suspects(self, blocked: bool = False) -> None:
        """Go on with the trial. The engine serves when it is over and everybody is back."""
        if self.life.ready is None:
            return
        suspect = self._trial.next(self.open, blocked)
        if suspect is not None:
            self._send(suspect.hand_over())
        elif self._trial.over:
            others = [each for each in self.open.values() if not each.handed_over]
            if others:
                self._send(*(each.hand_over() for each in others))
            self.ready = with_limit(self.life.ready, self.snapshot)
            self.settled.set()

    def lose_engine(self) -> None:
        """The engine is gone: what is open waits for the next one, commands fail.

        A sequence that was there at MAX_DEATHS deaths in a row without a token in between ends with
        an error.
        """
        self.ready = self.snapshot = None
        self._trial = Trial()
        for name, sequence in list(self.open.items()):
            sequence.lose_engine()
            if sequence.deaths >= MAX_DEATHS:
                message = f"the engine died {sequence.deaths} times on this request"
                self._end(name, message, "engine_failed")
        self._refuse_commands("the engine is restarting", "restarting")

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
        self.ready = self.snapshot = None
        for sequence in self.open.values():
            sequence.handed_over = False
        self.end_open("the engine stopped", "engine_failed")
        self._refuse_commands("the engine stopped", "engine_failed")
        self.settled.set()

    def _refuse_commands(self, message: str, code: str) -> None:
        for future in self._replies.values():
            if not future.done():
                future.set_exception(ApiError(503, message, code))
        self._replies.clear()

    def require_ready(self) -> Ready:
        """What the engine said when it was ready.

        Raises:
            ApiError: 503, loading, restarting, draining or failed.
        """
        if self.state == "ready" and self.ready is not None:
            return self.ready
        if self.state == "loading":
            stage, progress = self.loading
            raise ApiError(503, f"the model is loading: {stage}, {progress:.0%}", "loading")
        if self.state == "draining":
            raise ApiError(503, "the daemon is shutting down", "draining")
        if self.state == "restarting":
            raise ApiError(503, "the engine is restarting", "restarting")
        raise ApiError(503, "the engine stopped", "engine_failed")

    @contextlib.contextmanager
    def generate(self, submits: Sequence[Submit]) -> Iterator[Outputs]:
        """Submit the sequences of a request; those not finished at the end are aborted.

        Raises:
            ApiError: 503, the daemon is not ready.
        """
        self.require_ready()
        if self.watcher is not None:
            self.watcher.opening()
        outputs = Outputs(self, len(submits))
        now = self._clock()
        sequences = [OpenSequence(submit, outputs.put, now) for submit in submits]
        self.open |= {each.submit.request_id: each for each in sequences}
        self.idle.clear()
        self._send(*(each.hand_over() for each in sequences))
        try:
            yield outputs
        finally:
            for submit in submits:
                self.abort(submit.request_id)

    def abort(self, sequence_id: str, reason: Literal["stop", "abort"] = "abort") -> None:
        """Forget a sequence and free what it holds in the engine; nothing if it has ended."""
        if sequence_id in self.open and self._close(sequence_id, reason).handed_over:
            self._send(Abort(sequence_id, reason))

    def _close(self, sequence_id: str, outcome: FinishReason) -> OpenSequence:
        sequence = self.open.pop(sequence_id)
        if self.watcher is not None:
            self.watcher.closed(sequence, outcome)
        self.ended += 1
        if not self.open:
            self.idle.set()
        return sequence

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
            self._end(name, message, code)
        return len(chosen)

    def _end(self, name: str, message: str, code: str) -> None:
        sequence = self._close(name, "error" if code == "engine_failed" else "abort")
        if sequence.handed_over:
            self._send(Abort(name))
        sequence.deliver(Output(name, finish_reason="error", error=message, error_code=code))

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
        if self.ready is None:
            self.require_ready()
        command_id = next(self._command_ids)
        future = asyncio.get_running_loop().create_future()
        self._replies[command_id] = future
        self._send(kind(command_id, **fields))
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
