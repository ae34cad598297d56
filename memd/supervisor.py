"""Keeps an engine process alive: starts it, watches its progress, ends and replaces it.

Part of the api process, on its event loop. What open requests need to go on is the engine client's
(`memd.api.engine_client`, `memd.api.recovery`); here is only the life of the process.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

from memd.api.engine_client import EngineClient
from memd.api.recovery import RestartReason
from memd.engine.messages import Start
from memd.engine.port import ZmqApiPort
from memd.errors import MemdError
from memd.stacks import FILE_SIGNAL, STACKS_SIGNAL

MAX_DEATHS = 5
FIRST_PAUSE_SECONDS = 0.5
STABLE_SECONDS = 10.0
LOADING_SILENCE_SECONDS = 300.0
_EXIT_SECONDS = 5.0
_LAST_WORDS_SECONDS = 0.2
_STACKS_SECONDS = 3.0
STACKS_FILE = "engine-stacks"
_log = logging.getLogger(__name__)


class Death(NamedTuple):
    """How an engine ended."""

    reason: RestartReason
    text: str


class Supervisor:
    """Owns the engine process.

    Args:
        client: Connected to each engine in turn, and told when it is gone.
        directory: Private; holds the sockets between the processes.
        start: The first message for an engine, with the settings in force when it is called; waits
            until the model is known.
        hang_timeout_seconds: An engine without progress for as long is ended.
        record: Keeps an event: kind, message, details.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        client: EngineClient,
        directory: Path,
        start: Callable[[], Awaitable[Start]],
        hang_timeout_seconds: float,
        record: Callable[[str, str, dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._directory = directory
        self._start = start
        self._hang_timeout_seconds = hang_timeout_seconds
        self._record = record
        self._clock = clock
        self._process: Process | None = None
        self._stopping = False

    async def run(self) -> None:
        """Keep an engine alive until told to stop, or until it dies MAX_DEATHS times in a row.

        An engine that made a step, or served STABLE_SECONDS, breaks the row. Cancelling ends the
        engine at once.
        """
        in_a_row = 0
        for number in count():
            death = await self._live(number)
            if self._stopping or self._client.failure is not None:
                return
            in_a_row = 1 if self._proved_itself() else in_a_row + 1
            self._client.lose_engine()
            details = {"reason": death.reason, "in_a_row": in_a_row}
            waiting = {"open_sequences": len(self._client.open)}
            self._record("engine_death", death.text, {**details, **waiting})
            if in_a_row == MAX_DEATHS:
                _log.error("the engine failed: %s", death.text)
                self._client.fail(f"the engine died {in_a_row} times in a row; {death.text}")
                return
            pause = FIRST_PAUSE_SECONDS * 2 ** (in_a_row - 2) if in_a_row > 1 else 0.0
            self._client.restarts[death.reason] += 1
            _log.error(
                "%s; restarting it in %.1f s, %d sequences wait for it",
                *(death.text, pause, len(self._client.open)),
            )
            await asyncio.sleep(pause)

    async def stop(self) -> None:
        """Let the engine end by itself, as long as it takes but not for ever."""
        self._stopping = True
        if self._process is None or self._client.ready is None:
            return
        self._client.shut_down()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_SECONDS):
                await self._process.wait()

    def write_stacks(self) -> None:
        """Have the engine write its stacks to the log; nothing before it has said a word."""
        if self._process is not None and self._client.life.signs > 0:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(STACKS_SIGNAL)

    def read_stacks(self) -> str:
        """The stacks of the engine's threads, even of one that hangs. Blocks; for a thread.

        Raises:
            MemdError: no engine lives, or it did not write them.
        """
        if self._process is None or self._client.life.signs == 0:
            raise MemdError("no engine is there")
        file = self._directory / STACKS_FILE
        file.write_text("")
        try:
            self._process.send_signal(FILE_SIGNAL)
        except ProcessLookupError:
            raise MemdError("the engine has just ended") from None
        deadline, text = self._clock() + _STACKS_SECONDS, ""
        while not text or len(text) < file.stat().st_size:
            if self._clock() > deadline:
                raise MemdError(f"the engine wrote no stacks within {_STACKS_SECONDS:g} s")
            time.sleep(0.02)
            text = file.read_text()
        return text

    def _proved_itself(self) -> bool:
        life = self._client.life
        served = self._clock() - life.ready_at if life.ready is not None else 0.0
        return life.steps > 0 or served > STABLE_SECONDS

    async def _live(self, number: int) -> Death:
        """One engine, from its start to its death; nothing is left of it."""
        address = f"ipc://{self._directory / f'engine-{number}'}"
        port = ZmqApiPort(address)
        try:
            self._client.connect(port)
            self._process = await _spawn(address, self._directory / STACKS_FILE)
            return await self._watch(self._process)
        except OSError as error:
            return Death("crashed", f"the engine process cannot be started: {error}")
        finally:
            port.close()

    async def _watch(self, process: Process) -> Death:
        receiving = asyncio.create_task(self._client.run())
        exited = asyncio.create_task(process.wait())
        hung = asyncio.create_task(self._silence())
        tasks = (receiving, exited, hung, asyncio.create_task(self._send_start()))
        try:
            await asyncio.wait(tasks[:3], return_when=asyncio.FIRST_COMPLETED)
            return await self._autopsy(receiving, exited, hung)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _send_start(self) -> None:
        self._client.start(await self._start())

    async def _autopsy(
        self,
        receiving: asyncio.Task[None],
        exited: asyncio.Task[int],
        hung: asyncio.Task[float],
    ) -> Death:
        if receiving.done():
            _log.error("reading from the engine failed", exc_info=receiving.exception())
            return Death("crashed", "the engine's messages cannot be read; see the log")
        if not exited.done():
            return Death("hung", f"the engine made no progress for {hung.result():.1f} s")
        # What it said last may still be on its way.
        await asyncio.sleep(_LAST_WORDS_SECONDS)
        code = exited.result()
        if code < 0:
            return Death("killed", f"the engine process was ended by {Signals(-code).name}")
        words = self._client.life.last_words
        return Death("crashed", words or f"the engine process ended with code {code}")

    async def _silence(self) -> float:
        """Wait for a hang. Returns for how many seconds there has been no progress.

        Adds up pieces in which nothing came: were this process itself stopped for long, that would
        count as one piece.
        """
        life = self._client.life
        signs, silent = life.signs, 0.0
        while True:
            limit = self._hang_timeout_seconds
            if life.ready is None:
                limit = max(limit, LOADING_SILENCE_SECONDS)
            if silent >= limit:
                return silent
            piece = min(self._hang_timeout_seconds / 10, 1.0)
            await asyncio.sleep(piece)
            silent += piece
            if life.signs != signs or not life.started:
                signs, silent = life.signs, 0.0


async def _spawn(address: str, stacks: Path) -> Process:
    """Start an engine in its own session, so that a terminal's Ctrl-C reaches the daemon only."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "memd.engine.process"),
        *("--address", address, "--parent", str(os.getpid()), "--stacks", str(stacks)),
        start_new_session=True,
        # How long torch's threads spin at a barrier before they sleep. The default, 30 times this,
        # makes a decode step 10 % faster alone and several times slower beside a busy process.
        env={"GOMP_SPINCOUNT": "10000", **os.environ},
    )
