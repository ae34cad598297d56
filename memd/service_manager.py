"""What the daemon tells the service manager that started it: systemd's notification protocol.

Messages are datagrams to the socket that `NOTIFY_SOCKET` names; without it nothing is sent. Runs on
the event loop and never blocks: what the socket does not take now is kept and sent later, and a
watchdog message is better left out than sent late.

Source: sd_notify(3), systemd.service(5).
"""

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import NamedTuple

from memd.api.engine_client import EngineClient

STATUS_SECONDS = 5.0  # between two lines of one state
LOOK_SECONDS = 1.0
EXTENSION_SECONDS = 60.0
STOP_MARGIN_SECONDS = 30.0
_MAX_STATUS_CHARACTERS = 200
_log = logging.getLogger(__name__)


class Look(NamedTuple):
    """The daemon at one moment.

    Args:
        state: As in `GET /admin/v1/status`.
        line: What it does, for people.
        progress: Changes as long as the engine goes on.
    """

    state: str
    line: str
    progress: tuple[float, ...]


def look_at(engine: EngineClient, name: str, now: float) -> Look:
    """What there is to tell.

    A load counts as progress: its silence is bounded by the supervisor, which ends it.

    Args:
        engine: The connection to the engine.
        name: Of the served model.
        now: Monotonic seconds.
    """
    state, life = engine.state, engine.life
    loads = life.ready is None and engine.failure is None
    progress = (float(sum(engine.restarts.values())), now if loads else float(life.signs))
    if state in ("loading", "restarting"):
        stage, share = engine.loading
        return Look(state, f"{state}: {stage}, {share:.0%}", progress)
    if state == "failed":
        return Look(state, f"failed: {engine.failure}", progress)
    if state == "draining":
        return Look(state, f"draining: {len(engine.open)} sequences are open", progress)
    line, snapshot = f"serves {name}", engine.snapshot
    if snapshot is not None:
        pool, waiting = snapshot.pool, sum(snapshot.waiting.values())
        occupied = 1 - pool.free_pages / pool.capacity_pages
        line += f": {snapshot.running} running, {waiting} waiting, pool {occupied:.0%} occupied"
    return Look(state, line, progress)


class ServiceManager:
    """The one that sends. All methods may be called without a service manager.

    Args:
        address: Of its socket; `@` first: in the abstract namespace. None: there is none.
        watchdog_seconds: It restarts a daemon that sends none for as long; None: never.
    """

    def __init__(self, address: str | None, watchdog_seconds: float | None = None) -> None:
        self._address = "\0" + address[1:] if address and address[0] == "@" else address
        self.watchdog_seconds = watchdog_seconds
        self._socket: socket.socket | None = None
        self._unsent: deque[bytes] = deque(maxlen=64)
        self._task: asyncio.Task[None] | None = None
        self._is_ready = False
        self._warned = False

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> "ServiceManager":
        """Take its variables out of the environment, so that no process started later has them."""
        address = environment.pop("NOTIFY_SOCKET", None)
        limit = environment.pop("WATCHDOG_USEC", "")
        watched = environment.pop("WATCHDOG_PID", None) in (None, str(os.getpid()))
        if address is not None and address[:1] not in ("/", "@"):
            _log.warning("NOTIFY_SOCKET names no Unix socket: the service manager is told nothing")
            address = None
        watchdog = int(limit) / 1e6 if limit.isdecimal() and int(limit) and watched else None
        return cls(address, watchdog)

    def start(self, look: Callable[[float], Look]) -> None:
        """Follow the daemon from now on.

        Args:
            look: The daemon as it is, at monotonic seconds.
        """
        if self._address is None or self._task is not None:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._task = asyncio.create_task(self._follow(look))

    async def stop(self) -> None:
        """Say no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._socket is not None:
            self._flush()
            self._socket.close()
            self._socket = None

    def ready(self) -> None:
        """It serves."""
        self._is_ready = True
        self._send("READY=1")

    def reloading(self) -> None:
        """A reload begins. Before it serves that is part of the start."""
        if self._is_ready:
            self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reloaded(self) -> None:
        """The reload has ended, well or not."""
        if self._is_ready:
            self._send("READY=1")

    def stopping(self, limit_seconds: float) -> None:
        """The drain begins and takes at most so long."""
        self._is_ready = False
        usec = round((limit_seconds + STOP_MARGIN_SECONDS) * 1e6)
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={usec}")

    async def _follow(self, look: Callable[[float], Look]) -> None:
        pause = min(LOOK_SECONDS, (self.watchdog_seconds or LOOK_SECONDS) / 4)
        told, told_at = Look("", "", ()), 0.0
        progress: tuple[float, ...] = ()
        while True:
            now = time.monotonic()
            seen = look(now)
            due = seen.line != told.line and now - told_at >= STATUS_SECONDS
            if seen.state != told.state or due:
                told, told_at = seen, now
                self._send("STATUS=" + " ".join(seen.line.split())[:_MAX_STATUS_CHARACTERS])
            if seen.progress != progress:
                progress = seen.progress
                if seen.state == "loading":
                    # A load that goes on may take longer than the unit's TimeoutStartSec.
                    self._send(f"EXTEND_TIMEOUT_USEC={round(EXTENSION_SECONDS * 1e6)}")
                if self.watchdog_seconds is not None and not self._unsent:
                    self._send("WATCHDOG=1")
            self._flush()
            await asyncio.sleep(pause)

    def _send(self, message: str) -> None:
        if self._socket is not None:
            self._unsent.append(message.encode())
            self._flush()

    def _flush(self) -> None:
        while self._socket is not None and self._unsent:
            try:
                self._socket.sendto(self._unsent[0], str(self._address))
            except BlockingIOError:
                return
            except OSError as error:
                if not self._warned:
                    _log.warning("the service manager cannot be told: %s", error.strerror)
                self._warned = True
            self._unsent.popleft()
