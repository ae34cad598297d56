"""The two files of the alerts: their state, and the channels. Blocking; called on threads."""

import logging
import os
from contextlib import suppress
from pathlib import Path

import msgspec
from memd_alerts.channels import Channel, ChannelsError, load_channels
from memd_alerts.state import State

_log = logging.getLogger(__name__)


class StateFile:
    """What a restart must remember, as JSON.

    Args:
        path: In the state directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> State:
        """As it was saved; empty if there is none, or none that can be read."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=State)
        except FileNotFoundError:
            return State()
        except (OSError, msgspec.MsgspecError) as error:
            _log.error("%s cannot be read, alerts begin anew: %s", self._path, error)
            return State()

    def save(self, state: State) -> None:
        """Whole or not at all. A full disk costs what a restart would remember, nothing else."""
        new = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(state), indent=1))
            new.replace(self._path)
        except OSError as error:
            _log.error("%s cannot be written: %s", self._path, error.strerror)


class ChannelsFile:
    """The channels, read again when the file changes.

    Args:
        path: As set; None: there are none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path.expanduser() if path is not None else None
        self._stamp: tuple[float, int] | None = None
        self._channels: dict[str, Channel] = {}

    def read(self) -> dict[str, Channel]:
        """By name.

        Raises:
            ChannelsError: the file cannot be used; the former channels can be had from `current`.
        """
        if self._path is None:
            return {}
        stamp = None
        with suppress(OSError):
            found = self._path.stat()
            stamp = (found.st_mtime, found.st_size)
            if stamp != self._stamp and found.st_mode & 0o077:
                _log.warning("%s holds secrets, but not only its owner may use it", self._path)
        if stamp is None or stamp != self._stamp:
            self._stamp = stamp
            self._channels = load_channels(self._path)
        return self._channels

    def current(self) -> dict[str, Channel]:
        """Like `read`; what cannot be used leaves the former ones in force."""
        try:
            return self.read()
        except ChannelsError as error:
            _log.error("the channels of before stay in force: %s", error)
            return self._channels
