"""The service manager's end of its notification socket."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self


class NotifySocket:
    """Receives what a daemon tells its service manager.

    Args:
        directory: The socket is made here.
        name: `@…`: in the abstract namespace instead.
    """

    def __init__(self, directory: Path, name: str = "notify") -> None:
        abstract = name.startswith("@")
        self.address = name if abstract else str(directory / name)
        self.messages: list[dict[str, str]] = []
        self._seen = 0  # of the messages, by what waits for one
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + name[1:] if abstract else self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def receive(self, seconds: float) -> list[dict[str, str]]:
        """What comes within so long, each message's assignments by name."""
        deadline, came = time.monotonic() + seconds, []
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                text = self._socket.recv(4096).decode()
            except TimeoutError:
                break
            came.append(dict(line.split("=", 1) for line in text.splitlines()))
        self.messages += came
        self._seen = len(self.messages)
        return came

    def wait_for(
        self, met: Callable[[dict[str, str]], bool], seconds: float = 60
    ) -> dict[str, str]:
        """The next message of which `met` holds, after the one found before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            while self._seen < len(self.messages):
                self._seen += 1
                if met(self.messages[self._seen - 1]):
                    return self.messages[self._seen - 1]
            seen = self._seen
            self.receive(0.05)
            self._seen = seen
        raise AssertionError(f"not in {seconds} s; came: {self.messages}")
