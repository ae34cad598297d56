"""Reads the daemon's GPU through NVML, on a thread of its own.

A call that never returns costs this thread and nothing else: what it read last is dropped when it
is too old, and the reason can be asked for. Nothing is loaded before the engine says that it is on
a GPU.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from memd.engine.messages import Ready
from memd.engine.snapshot_types import EngineSnapshot
from memd.observe.catalog.gpu import THROTTLE_REASONS
from memd.observe.gpu_memory import MemoryByOwner, memory_by_owner
from memd.observe.nvml import Board, BoardLost, BoardName, Reading

MAX_XIDS = 16  # labels of their own; later ones are `other`
WAIT_SLICE_SECONDS = 1.0
STALE_POLLS = 3  # a reading older than so many polls, and the slack, is not shown
STALE_SLACK_SECONDS = 5.0
REOPEN_SECONDS = 60.0
LOADING_SECONDS = 1.0  # the engine is expected any moment
_log = logging.getLogger(__name__)


class GpuSource(Protocol):
    """What is known of the engine: `memd.api.engine_client.EngineClient`."""

    ready: Ready | None
    snapshot: EngineSnapshot | None


@dataclass(frozen=True)
class GpuState:
    """The GPU as last read."""

    board: BoardName
    reading: Reading
    memory: MemoryByOwner


def load_pynvml() -> Any:
    """NVML's module, initialised. Raises its NVMLError."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


class GpuReader:
    """Polls one GPU from `start` to `stop`. Everything else may be read on any thread.

    Args:
        source: Says which GPU is the engine's, and what it has taken there.
        every_seconds: Between two polls.
        load: Gives NVML's functions, initialised; raises when they cannot be had.
        clock: Monotonic seconds.

    Attributes:
        throttled_seconds: By reason, summed over polls.
        xid_errors: By Xid; `none` is always 0, so that the family exists.
        pcie_bytes: By direction, summed over polls.
    """

    def __init__(
        self,
        source: GpuSource,
        every_seconds: float,
        load: Callable[[], Any] = load_pynvml,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._every_seconds = every_seconds
        self._load = load
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu", daemon=True)
        self._board: Board | None = None
        self._state: GpuState | None = None
        self._read_at = 0.0
        self._asked_at: float | None = None  # a poll is under way since then
        self._failures = 0
        self._problem: str | None = "the engine has not started yet"
        self.throttled_seconds: dict[str, float] | None = None
        self.xid_errors: dict[str, int] = {"none": 0}
        self.pcie_bytes: dict[str, float] = {}

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    async def stop(self) -> None:
        """End; a thread that NVML holds is left to end with the process."""
        self._stop.set()

    def join(self, timeout_seconds: float) -> bool:
        """Whether the thread has ended in time."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def every_seconds(self) -> float:
        """Between two polls."""
        return self._every_seconds

    @property
    def state(self) -> GpuState | None:
        """What was read last; None: nothing, or too long ago."""
        age = self._clock() - self._read_at
        return self._state if self._state is not None and age <= self._stale_seconds else None

    @property
    def problem(self) -> str | None:
        """Why there is no state, in words; None: there is one."""
        if self.state is not None:
            return None
        hanging = self._hanging_seconds
        if hanging is not None:
            return f"NVML has not answered for {hanging:.0f} s"
        return self._problem or "NVML has not told anything lately"

    @property
    def failures(self) -> int:
        """Calls that failed or took too long."""
        return self._failures + (self._hanging_seconds is not None)

    @property
    def _stale_seconds(self) -> float:
        return STALE_POLLS * self._every_seconds + STALE_SLACK_SECONDS

    @property
    def _hanging_seconds(self) -> float | None:
        """How long a poll has been under way, once that is too long."""
        asked_at = self._asked_at
        if asked_at is None:
            return None
        waited = self._clock() - asked_at
        return waited if waited > self._stale_seconds else None

    def _run(self) -> None:
        while not self._stop.is_set():
            loading = self._source.ready is None
            pause = min(LOADING_SECONDS, self._every_seconds) if loading else self._every_seconds
            try:
                if self._board is None:
                    self._open()
                if self._board is not None:
                    self._poll(self._board)
            except BoardLost as lost:
                self._close(str(lost))
            except Exception as error:  # of loading and opening: whatever the driver makes of it
                self._close(f"NVML cannot be used: {error}")
                pause = max(pause, REOPEN_SECONDS)
            if self._hanging_seconds is not None:
                self._fail()
            self._asked_at = None
            self._rest(pause)

    def _open(self) -> None:
        ready = self._source.ready
        if ready is None:
            return
        if ready.gpu is None:
            self._problem = "the engine runs on the CPU"
            return
        self._asked_at = self._clock()
        self._board = Board(self._load(), ready.gpu.uuid, self._fail)
        self._problem = None

    def _fail(self) -> None:
        self._failures += 1

    def _close(self, problem: str) -> None:
        if problem != self._problem:
            _log.warning("GPU telemetry: %s", problem)
        self._fail()
        self._board, self._state, self._problem = None, None, problem

    def _poll(self, board: Board) -> None:
        ready, snapshot = self._source.ready, self._source.snapshot
        if ready is None or ready.gpu is None or snapshot is None:  # the engine is replaced
            self._state, self._problem = None, "the engine is restarting"
            return
        self._asked_at = self._clock()
        reading = board.read()
        now = self._clock()
        self._account(reading, min(now - self._read_at, 2 * self._every_seconds))
        memory = memory_by_owner(
            reading.memory,
            snapshot.pool.committed_bytes,
            ready.gpu,
            snapshot.allocator_bytes,
            reading.process_bytes.get(ready.pid),
        )
        self._state, self._read_at = GpuState(board.name, reading, memory), now

    def _account(self, reading: Reading, elapsed_seconds: float) -> None:
        """Sum up what NVML tells as states and rates; nothing on the first poll."""
        first = self._state is None
        elapsed_seconds = 0.0 if first else elapsed_seconds
        if reading.throttled_by is not None:
            before = self.throttled_seconds or dict.fromkeys(THROTTLE_REASONS, 0.0)
            self.throttled_seconds = {
                reason: seconds + elapsed_seconds * (reason in reading.throttled_by)
                for reason, seconds in before.items()
            }
        rates = MappingProxyType(reading.pcie_bytes_per_second)
        self.pcie_bytes = {
            way: self.pcie_bytes.get(way, 0.0) + rate * elapsed_seconds
            for way, rate in rates.items()
        }

    def _rest(self, seconds: float) -> None:
        """Wait for the next poll, and for errors of the driver meanwhile."""
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0 and not self._stop.is_set():
            board = self._board
            if board is None or not board.tells_xids:
                self._stop.wait(left)
                continue
            try:
                xid = board.wait_for_xid(min(left, WAIT_SLICE_SECONDS))
            except BoardLost as lost:
                self._close(str(lost))
                continue
            if xid is not None:
                self._count_xid(xid)

    def _count_xid(self, xid: int) -> None:
        _log.error("the GPU's driver reports Xid %d", xid)
        label = str(xid)
        if label not in self.xid_errors and len(self.xid_errors) > MAX_XIDS:
            label = "other"
        self.xid_errors = {**self.xid_errors, label: self.xid_errors.get(label, 0) + 1}
