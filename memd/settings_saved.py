"""The file in the state directory that keeps live values over a restart.

It holds the number of the latest revision, so that numbers rise over restarts whatever becomes of
the database, and the values of the changes that asked to be kept. Written whole, on threads.
"""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memd.background import in_thread
from memd.config import LIVE_KEYS
from memd.errors import MemdError, SettingsError
from memd.settings_history import Override
from memd.settings_state import State

FILE = "live-settings.json"
TIMEOUT_SECONDS = 5.0
_log = logging.getLogger(__name__)


class SavedError(MemdError):
    """The file cannot be written, or what it holds is not what memd wrote."""


class SavedSettings:
    """Reads and writes the file.

    Args:
        directory: The daemon's state directory; made when it is first needed.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._lock = threading.Lock()
        self._asked = 0  # writes, each with its number
        self._written = 0
        self._writing: set[asyncio.Task[None]] = set()

    def read(self) -> tuple[int, dict[str, Override]]:
        """The latest revision, and the values to begin with by dotted key. Blocks.

        Without a file: 0 and none.

        Raises:
            SavedError: the file cannot be read.
        """
        try:
            held = json.loads(self.path.read_text(encoding="utf-8"))
            values = {key: Override(**each) for key, each in held["values"].items()}
            return int(held["revision"]), values
        except FileNotFoundError:
            return 0, {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise SavedError(f"{self.path} cannot be read: {error}") from None

    async def save(self, revision: int, values: Mapping[str, Override]) -> None:
        """Replace the file, on a thread; of several writes the one asked for last stays.

        Args:
            revision: The latest.
            values: By dotted key.

        Raises:
            SavedError: it cannot be written, and the former file is still there; or that takes
                longer than TIMEOUT_SECONDS.
        """
        await self._save(self._next(), revision, values)

    def save_later(self, revision: int, values: Mapping[str, Override]) -> asyncio.Task[None]:
        """Like `save`, in the background; a failure is logged, and not raised."""
        number = self._next()  # now: the task may start after another write has

        async def save() -> None:
            try:
                await self._save(number, revision, values)
            except SavedError as error:
                _log.warning("the number of revision %d is not kept: %s", revision, error)

        task = asyncio.create_task(save())
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        return task

    async def stop(self) -> None:
        """Wait for what is being written."""
        await asyncio.gather(*self._writing, return_exceptions=True)

    def set_aside(self) -> Path:
        """Move a file that cannot be used out of the way; returns where it is now. Blocks.

        Raises:
            SavedError: it cannot be moved.
        """
        aside = self.path.with_suffix(".refused.json")
        try:
            os.replace(self.path, aside)
        except OSError as error:
            raise SavedError(f"{self.path} cannot be moved: {error.strerror}") from None
        return aside

    def _next(self) -> int:
        # Not the revision: what follows a refused one is written under the same or a lower one.
        self._asked += 1
        return self._asked

    async def _save(self, number: int, revision: int, values: Mapping[str, Override]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await in_thread(lambda: self._write(number, revision, values), "save-settings")
        except TimeoutError:
            raise SavedError(f"{self.path} was not written in {TIMEOUT_SECONDS:g} s") from None

    def _write(self, number: int, revision: int, values: Mapping[str, Override]) -> None:
        """Replace the file, unless a write that was asked for later has done so. Blocks.

        Raises:
            SavedError: it cannot be written; the former file is still there.
        """
        held: dict[str, Any] = {"revision": revision}
        held["values"] = {key: asdict(each) for key, each in values.items()}
        with self._lock:
            if number < self._written:
                return
            try:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._replace(json.dumps(held, indent=1))
            except OSError as error:
                raise SavedError(f"{self.path} cannot be written: {error.strerror}") from None
            self._written = number

    def _replace(self, text: str) -> None:
        temporary = self.path.with_suffix(".new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def take_up(saved: SavedSettings, state: State) -> State:
    """The state of a start with what earlier lives left, if it still makes sense. Blocks.

    A file that cannot be read, or whose values are not valid with what the sources say now, is set
    aside: a daemon that starts with its file's settings and says so is better than one that does
    not start.
    """
    number = 0
    try:
        number, values = saved.read()
        return state.beginning(number, {k: o for k, o in values.items() if k in LIVE_KEYS})
    except (SavedError, SettingsError) as error:
        _log.error("live values of earlier lives are not taken up: %s", error)
    try:
        _log.error("they are kept in %s", saved.set_aside())
    except SavedError as error:
        _log.error("%s", error)
    return state.beginning(number, {})
