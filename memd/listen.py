"""The sockets that the daemon listens at: TCP, a Unix socket, or both."""

import contextlib
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memd.config import ServerSettings
from memd.errors import MemdError


class ListenError(MemdError):
    """An address is taken or not ours; the message names it and says why."""


@dataclass(frozen=True)
class Doors:
    """Bound and listening sockets, and how clients name them, in the same order."""

    sockets: list[socket.socket]
    urls: list[str]


@contextlib.contextmanager
def listening(server: ServerSettings) -> Iterator[Doors]:
    """Listen as the settings say; at the end the Unix socket's file is removed.

    Raises:
        ListenError: an address cannot be listened at.
    """
    with contextlib.ExitStack() as stack:
        doors = Doors([], [])
        if server.host is not None:
            try:
                listener = stack.enter_context(listen(server.host, server.port))
            except OSError as error:
                address = f"{server.host}:{server.port}"
                raise ListenError(f"cannot listen at {address}: {error.strerror}") from None
            doors.sockets.append(listener)
            doors.urls.append(_url(listener))
        if server.uds is not None:
            path = Path(server.uds).expanduser().absolute()
            doors.sockets.append(stack.enter_context(_listening_at(path, int(server.uds_mode, 8))))
            doors.urls.append(f"unix://{path}")
        yield doors


def listen(host: str, port: int) -> socket.socket:
    """A bound and listening socket; port 0: any free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    # Connections inherit it; the event loop sets it only on sockets that name their protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextlib.contextmanager
def _listening_at(path: Path, mode: int) -> Iterator[socket.socket]:
    """A Unix socket that appears at `path` with its permissions, and leaves with this daemon."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            _require_nobody(path)
            # Nobody can connect before the permissions are set: it is made under another name.
            unnamed = path.with_name(path.name + ".new")
            unnamed.unlink(missing_ok=True)
            listener.bind(str(unnamed))
            unnamed.chmod(mode)
            listener.listen(2048)
            inode = unnamed.stat().st_ino
            unnamed.replace(path)
        except OSError as error:
            raise ListenError(f"cannot listen at {path}: {error.strerror or error}") from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:  # else another daemon has taken the place
                    path.unlink()


def _require_nobody(path: Path) -> None:
    """Raises ListenError if `path` is no socket, or somebody answers there."""
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise ListenError(f"cannot listen at {path}: a file that is no socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:  # left behind by a daemon that was killed
            return
    raise ListenError(f"cannot listen at {path}: a process answers there already")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
