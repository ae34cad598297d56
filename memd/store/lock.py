"""One daemon for each state directory: an advisory lock that dies with its holder."""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from memd.errors import MemdError

LOCK_FILE = "memd.lock"
_PID_WAIT_SECONDS = 0.5


class StateLocked(MemdError):
    """Another daemon uses the state directory."""


class StateLock:
    """Holds a state directory, which is made (mode 0700) if there is none. A context manager.

    The file stays when the lock is given back: removing it would let two daemons lock two files of
    one name. The kernel frees the lock of a killed holder.

    Args:
        directory: The state directory.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_FILE
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            StateLocked: another process holds it; the message names its pid.
            MemdError: the directory or the file cannot be made.
        """
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise MemdError(
                f"the state directory {self._path.parent} cannot be used: {error.strerror}"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _pid_in(descriptor)
            os.close(descriptor)
            raise StateLocked(
                f"the state directory {self._path.parent} is in use by the daemon with pid "
                f"{holder or 'unknown'}; give this one its own with --state-dir"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give it back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _pid_in(descriptor: int) -> int | None:
    """The holder's pid, which it writes right after it has the lock."""
    deadline = time.monotonic() + _PID_WAIT_SECONDS
    while True:
        with suppress(ValueError):
            return int(os.pread(descriptor, 32, 0))
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)
