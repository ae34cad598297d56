"""The sockets that the daemon listens at: TCP, a Unix socket, or both.

They are its own, or those that a service manager has opened before it started the daemon (socket
activation, sd_listen_fds(3)): then clients may connect while the daemon is not there.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from memd.config import ServerSettings, is_loopback
from memd.errors import MemdError

SOCKET_NAMES = ("memd", "memd.socket", "unknown", "")  # FileDescriptorName=, or none was given
_FIRST_INHERITED = 3
_LISTEN_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class ListenError(MemdError):
    """An address is taken or not ours; the message names it and says why."""


@dataclass(frozen=True)
class Doors:
    """Bound and listening sockets, and how clients name them, in the same order."""

    sockets: list[socket.socket]
    urls: list[str]


@contextlib.contextmanager
def listening(
    server: ServerSettings, inherited: list[socket.socket] | None = None
) -> Iterator[Doors]:
    """Listen as the settings say; at the end the Unix socket's file is removed.

    Args:
        server: Where.
        inherited: Listening sockets; one for TCP takes the place of `server.host` and
            `server.port`, a Unix socket that of `server.uds`. Their files are left.

    Raises:
        ListenError: an address cannot be listened at, or may not be without keys.
    """
    with contextlib.ExitStack() as stack:
        doors = Doors([], [])
        for door in inherited or []:
            stack.enter_context(door)
            doors.sockets.append(door)
            doors.urls.append(_checked_url(door, server))
        families = {door.family == socket.AF_UNIX for door in doors.sockets}
        if server.host is not None and False not in families:
            try:
                listener = stack.enter_context(listen(server.host, server.port))
            except OSError as error:
                address = f"{server.host}:{server.port}"
                raise ListenError(f"cannot listen at {address}: {error.strerror}") from None
            doors.sockets.append(listener)
            doors.urls.append(_url(listener))
        if server.uds is not None and True not in families:
            path = Path(server.uds).expanduser().absolute()
            doors.sockets.append(stack.enter_context(_listening_at(path, int(server.uds_mode, 8))))
            doors.urls.append(f"unix://{path}")
        yield doors


def inherited_sockets(environment: MutableMapping[str, str]) -> list[socket.socket]:
    """Take the sockets that a service manager has passed to this process, if any.

    Its variables are taken out of the environment, so that no process started later has them.

    Raises:
        ListenError: what was passed is not what memd listens at.
    """
    pid, count, names = (environment.pop(each, "") for each in _LISTEN_VARIABLES)
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    sockets = []
    for index, fd in enumerate(range(_FIRST_INHERITED, _FIRST_INHERITED + int(count))):
        name = [*names.split(":"), *[""] * int(count)][index]
        if name not in SOCKET_NAMES:
            raise ListenError(
                f"the service manager passed a socket named {name!r}; the socket unit must say "
                f"FileDescriptorName={SOCKET_NAMES[0]}"
            )
        try:
            os.set_inheritable(fd, False)
            door = socket.socket(fileno=fd)
        except OSError as error:
            raise ListenError(
                f"descriptor {fd} of the service manager is no socket: {error.strerror}"
            ) from None
        sockets.append(door)
    return sockets


def _checked_url(door: socket.socket, server: ServerSettings) -> str:
    """How clients name an inherited socket. Raises ListenError unless clients may connect to it."""
    if door.type != socket.SOCK_STREAM or not door.getsockopt(
        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    ):
        raise ListenError(
            f"descriptor {door.fileno()} of the service manager does not listen for streams: the "
            "socket unit must have ListenStream= and Accept=no"
        )
    if door.family == socket.AF_UNIX:
        return f"unix://{door.getsockname()}"
    host = door.getsockname()[0]
    if server.keys_file is None and not is_loopback(host):
        raise ListenError(
            f"the socket unit listens at {host}, which is not loopback: server.keys_file must name "
            "a file of API keys (memd keys add)"
        )
    door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _url(door)


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
