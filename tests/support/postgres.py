"""A real PostgreSQL server in a temporary directory, run by an unprivileged user."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_USERS = ("postgres", "nobody")  # the server refuses to run as root


def binaries() -> Path | None:
    """Where `initdb` and `postgres` are; None: they are not installed."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = shutil.which("initdb")
    if found is not None:
        folders.insert(0, Path(found).resolve().parent)
    return next((each for each in folders if (each / "postgres").exists()), None)


class Postgres:
    """One server on a free port of the loopback. Stop and start it as often as needed.

    Args:
        directory: Its own; belongs to `user`.
        user: Who runs it; None: whoever runs the tests.
    """

    def __init__(self, directory: Path, user: str | None) -> None:
        found = binaries()
        assert found is not None
        self._bin = found
        self._data = directory / "data"
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._run("initdb", "-D", self._data, "-U", "memd", "--auth=trust", "--no-sync")

    def url(self, database: str) -> str:
        return f"postgresql://memd@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> str:
        """A new, empty database; its URL."""
        self.sql(f'CREATE DATABASE "{database}"')
        return self.url(database)

    def sql(self, statement: str, database: str = "postgres") -> str:
        url = self.url(database)
        return self._run("psql", "-v", "ON_ERROR_STOP=1", "-Atqc", statement, url).strip()

    def start(self) -> None:
        settings = (
            f"port={self.port}",
            "listen_addresses=127.0.0.1",
            "unix_socket_directories=",
            "fsync=off",  # of a server that is thrown away
        )
        options = [part for each in settings for part in ("-c", each)]
        command = [*self._as_user(), str(self._bin / "postgres"), "-D", str(self._data), *options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/"
        )
        deadline = time.monotonic() + 30
        while True:
            ready = [str(self._bin / "pg_isready"), "-q", "-d", self.url("postgres")]
            if subprocess.run(ready, check=False).returncode == 0:
                return
            assert time.monotonic() < deadline, "PostgreSQL does not start"
            time.sleep(0.05)

    def stop(self) -> None:
        """At once, as a crash would."""
        if self._process is not None:
            pid = int((self._data / "postmaster.pid").read_text().split()[0])
            os.kill(pid, signal.SIGQUIT)
            self._process.wait(60)
            self._process = None

    def _as_user(self) -> list[str]:
        return [] if self._user is None else ["setpriv", f"--reuid={self._user}", "--clear-groups"]

    def _run(self, program: str, *arguments: object) -> str:
        command = [*self._as_user(), str(self._bin / program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """A server that lives as long as the context."""
    user = None
    with tempfile.TemporaryDirectory(prefix="memd-postgres-") as directory:
        if os.geteuid() == 0:
            known = {entry.pw_name: entry for entry in pwd.getpwall()}
            user = next(each for each in _USERS if each in known)
            os.chown(directory, known[user].pw_uid, known[user].pw_gid)
        server = Postgres(Path(directory), user)
        server.start()
        try:
            yield server
        finally:
            server.stop()
