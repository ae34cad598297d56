"""Records what sequences ask for and what becomes of them, as the simulator needs it; never text.

The event loop only puts ended sequences into a bounded queue; a thread makes digests of their pages
and hands rows to the store. When the queue is full sequences are dropped and counted. One recording
goes on at a time: one that an operator has started, else a continuous one while `trace.record` is
on. Its key is in memory only, so that nobody can try texts against the digests afterwards.
"""

import hashlib
import logging
import queue
import secrets
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from memd import __version__
from memd.api.engine_client import EngineClient
from memd.api.errors import ApiError
from memd.api.recovery import OpenSequence
from memd.background import in_thread
from memd.config import dump, flatten
from memd.settings import LiveSettings
from memd.simulate.trace import Outcome, TraceHeader, TracePool, whole_pages
from memd.store.store import Store
from memd.types import FinishReason

QUEUE_SEQUENCES = 4096
DIGEST_BYTES = 8
_KEEP_ALIVE_SECONDS = 3600.0
_SECTIONS, _PATHS = ("memory.", "kv.", "engine."), (".path",)
_log = logging.getLogger(__name__)

Kind = Literal["manual", "continuous"]


@dataclass(eq=False)
class Recording:
    """One recording under way.

    Args:
        id: For people and routes.
        kind: Whether somebody started it, or the setting did.
        who: Started it.
        reason: Why.
        began: Monotonic seconds.
        key: Of all digests in it.
        header: Of its export.
    """

    id: str
    kind: Kind
    who: str
    reason: str
    began: float
    key: bytes = field(repr=False)
    header: TraceHeader
    recorded: int = 0
    dropped: int = 0
    ended_at: float | None = None

    def row(self, now: float) -> dict[str, Any]:
        """Of the table `traces`."""
        header = replace(self.header, ended_at=self.ended_at, dropped=self.dropped)
        return {
            "id": self.id,
            "time": self.header.started_at,
            "updated_at": now,
            "ended_at": self.ended_at,
            "kind": self.kind,
            "who": self.who,
            "reason": self.reason,
            "dropped": self.dropped,
            "header": msgspec.to_builtins(header),
        }


@dataclass(frozen=True)
class _Ended:
    """What the thread needs of a sequence."""

    recording: Recording
    sequence: OpenSequence
    token_ids: list[int]
    outcome: Outcome
    duration_seconds: float


class TraceRecorder:
    """One per daemon. A SequenceWatcher of the engine client; used on the event loop.

    Attributes:
        counts: Sequences since the start, by "recorded" or "dropped".

    Args:
        model: Served name.
        engine: Gives the layout, and the sequences that are open.
        live: The settings in force.
        store: Takes the rows.
        clock: Unix seconds.
        monotonic: The engine client's clock.
    """

    def __init__(
        self,
        model: str,
        engine: EngineClient,
        live: LiveSettings,
        store: Store,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._engine = engine
        self._live = live
        self._store = store
        self._clock, self._monotonic = clock, monotonic
        self._queue: queue.Queue[_Ended | None] = queue.Queue(QUEUE_SEQUENCES)
        self._thread: threading.Thread | None = None
        self._written: tuple[str, int, int] | None = None
        self._written_at = 0.0
        self._stopped = False
        self.current: Recording | None = None
        self.counts = {"recorded": 0, "dropped": 0}

    def begin(self, who: str, reason: str, tenant_names: bool) -> Recording:
        """Begin a recording.

        Raises:
            ApiError: 409, one goes on; 503, the engine does not serve.
        """
        self.follow_setting()
        if self.current is not None:
            raise ApiError(
                409,
                f"the {self.current.kind} recording {self.current.id} goes on: one at a time",
                "recording",
            )
        return self._start("manual", who, reason, tenant_names)

    def end(self, who: str, reason: str) -> Recording:
        """End the recording that goes on; sequences that are open are part of it.

        Raises:
            ApiError: 409, none goes on, or it is continuous.
        """
        self.follow_setting()
        if self.current is None:
            raise ApiError(409, "no recording goes on", "not_recording")
        if self.current.kind == "continuous":
            raise ApiError(
                409, "the recording is continuous: set trace.record to false", "recording"
            )
        return self._finish(self.current, who, reason)

    def follow_setting(self) -> None:
        """Begin or end the continuous recording, as `trace.record` says."""
        trace, current = self._live.current.trace, self.current
        if current is None:
            if trace.record and self._engine.ready is not None and not self._stopped:
                self._start("continuous", "local", "trace.record is on", trace.tenant_names)
        elif current.kind == "continuous" and not trace.record:
            self._finish(current, "local", "trace.record is off")

    def opening(self) -> None:
        """See SequenceWatcher."""
        self.follow_setting()

    def closed(self, sequence: OpenSequence, outcome: FinishReason) -> None:
        """See SequenceWatcher."""
        recording = self.current
        if recording is not None and sequence.opened_at >= recording.began:
            self._put(recording, sequence, outcome)

    def keep_alive(self) -> None:
        """Follow the setting, and write what has been counted so far."""
        self.follow_setting()
        recording = self.current
        if recording is None:
            return
        state = (recording.id, recording.recorded, recording.dropped)
        stale = self._clock() - self._written_at >= _KEEP_ALIVE_SECONDS
        if state != self._written or stale:
            self._write_row(recording)

    async def flush(self) -> None:
        """Wait until what has been recorded can be read.

        Raises:
            StoreError: the database cannot be written now.
        """
        if self._thread is not None:
            await in_thread(self._queue.join, "trace-flush")
        await self._store.flush(("traces", "trace_requests"))

    async def stop(self) -> None:
        """End what goes on, and hand everything to the store."""
        self._stopped = True
        if self.current is not None:
            self._finish(self.current, "local", "memd stops")
        thread = self._thread
        if thread is not None:

            def drain() -> None:
                self._queue.put(None)
                thread.join()

            await in_thread(drain, "trace-stop")

    def _start(self, kind: Kind, who: str, reason: str, tenant_names: bool) -> Recording:
        began, now = self._monotonic(), self._clock()
        name = f"{datetime.fromtimestamp(now, UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        key = secrets.token_bytes(32)
        header = self._header(name, now, key, tenant_names)
        recording = self.current = Recording(name, kind, who, reason, began, key, header)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
            self._thread.start()
        self._write_row(recording)
        self._tell("trace_start", recording, who, reason)
        return recording

    def _finish(self, recording: Recording, who: str, reason: str) -> Recording:
        self.current = None
        recording.ended_at = self._clock()
        for sequence in self._engine.open.values():
            if sequence.opened_at >= recording.began:
                self._put(recording, sequence, "open")
        self._write_row(recording)
        self._tell("trace_stop", recording, who, reason)
        return recording

    def _tell(self, kind: str, recording: Recording, who: str, reason: str) -> None:
        details = {"id": recording.id, "kind": recording.kind, "who": who, "reason": reason}
        self._store.add_event(kind, f"{recording.id}, {who}: {reason}", details)

    def _header(self, name: str, now: float, key: bytes, tenant_names: bool) -> TraceHeader:
        ready, snapshot = self._engine.require_ready(), self._engine.snapshot
        flat = flatten(dump(self._live.current))
        flat |= snapshot.settings if snapshot is not None else {}
        settings = {
            name: value
            for name, value in flat.items()
            if name.startswith(_SECTIONS) and not name.endswith(_PATHS)
        }
        settings["tenants"] = [
            {**tenant, "name": _tenant(tenant["name"], key, tenant_names)}
            for tenant in flat["tenants"]
        ]
        return TraceHeader(
            id=name,
            started_at=now,
            ended_at=None,
            tenants="name" if tenant_names else "digest",
            model={"name": self._model, **ready.model},
            pool=msgspec.convert(ready.pool, TracePool),
            settings=settings,
            memd=__version__,
        )

    def _write_row(self, recording: Recording) -> None:
        self._written = (recording.id, recording.recorded, recording.dropped)
        self._written_at = self._clock()
        self._store.add_rows("traces", (recording.row(self._written_at),))

    def _put(self, recording: Recording, sequence: OpenSequence, outcome: Outcome) -> None:
        took = max(0.0, self._monotonic() - sequence.opened_at)
        ended = _Ended(recording, sequence, list(sequence.token_ids), outcome, took)
        try:
            self._queue.put_nowait(ended)
        except queue.Full:
            recording.dropped += 1
            self.counts["dropped"] += 1
        else:
            recording.recorded += 1
            self.counts["recorded"] += 1

    def _run(self) -> None:
        while (ended := self._queue.get()) is not None:
            try:
                self._store.add_rows("trace_requests", (_row(ended),))
            except Exception as error:  # whose words might hold what was said
                _log.error("trace: a sequence is left out: %s", type(error).__name__)
            finally:
                self._queue.task_done()
        self._queue.task_done()


def _row(ended: _Ended) -> dict[str, Any]:
    """Of the table `trace_requests`."""
    recording, sequence = ended.recording, ended.sequence
    submit, generated = sequence.submit, len(ended.token_ids)
    key, header = recording.key, recording.header
    namespace = _digest(key, b"namespace", submit.salt.encode())
    group = submit.request_id.rpartition("-")[0]
    return {
        "time": header.started_at + (sequence.opened_at - recording.began),
        "trace_id": recording.id,
        "request": _digest(key, b"request", group.encode()),
        "namespace": namespace,
        "tenant": _tenant(submit.tenant, key, header.tenants == "name"),
        "priority": submit.priority,
        "prompt_tokens": len(submit.prompt_tokens),
        "output_tokens": generated,
        "max_tokens": submit.sampling.max_tokens,
        "outcome": ended.outcome,
        "duration_seconds": ended.duration_seconds,
        "cached_tokens": sequence.cached_tokens,
        "pages": page_digests(
            key, namespace, submit.prompt_tokens, ended.token_ids, header.pool.page_tokens
        ),
    }


def page_digests(
    key: bytes, namespace: bytes, prompt: list[int], output: list[int], page_tokens: int
) -> bytes:
    """Digests of the whole pages that a sequence fills, DIGEST_BYTES each, chained.

    Args:
        key: Of the recording.
        namespace: Digest, where the chain begins.
        prompt: Token ids.
        output: Token ids; the last is never computed.
        page_tokens: Of the pool.
    """
    tokens = array("i", prompt)
    tokens.extend(output[:-1])
    content = memoryview(tokens).cast("B")
    page_bytes = page_tokens * tokens.itemsize
    chain, found = hashlib.blake2b(namespace, key=key, digest_size=DIGEST_BYTES), bytearray()
    for at in range(whole_pages(len(prompt), len(output), page_tokens)):
        chain.update(content[at * page_bytes : (at + 1) * page_bytes])
        found += chain.digest()
    return bytes(found)


def _digest(key: bytes, what: bytes, content: bytes | memoryview) -> bytes:
    """Says nothing without the key."""
    digest = hashlib.blake2b(what, key=key, digest_size=DIGEST_BYTES)
    digest.update(content)
    return digest.digest()


def _tenant(name: str, key: bytes, by_name: bool) -> str:
    if by_name or not name:
        return name
    return _digest(key, b"tenant", name.encode()).hex()
