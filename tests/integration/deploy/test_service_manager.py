"""A real daemon under a service manager: notifications, watchdog, passed sockets, stacks."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from notify import NotifySocket
from tiny import write_model

from memd.client import Client

SERVE = (sys.executable, "-m", "memd.cli", "serve")
TINY = ("memory.limit=4096 tokens", "engine.threads=1", "engine.device=cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = write_model(tmp_path_factory.mktemp("models") / "tiny")
    return directory


class Started:
    """A daemon, and where its output goes."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def wait_for_log(self, met: Callable[[str], object], seconds: float = 60) -> str:
        deadline = time.monotonic() + seconds
        while not met(text := self.log.read_text()):
            assert time.monotonic() < deadline, text
            time.sleep(0.05)
        return text

    def url(self) -> str:
        text = self.wait_for_log(lambda text: " at http" in text or " at unix" in text)
        return text.partition("memd serves tiny at ")[2].split()[0]


@contextmanager
def started(
    model: Path, state: Path, *assignments: str, before: tuple[str, ...] = (), **environment: str
) -> Iterator[Started]:
    """`memd serve`, perhaps started by another program."""
    command = [*before, *SERVE, "--model", str(model), "--state-dir", str(state / "state")]
    for assignment in (*TINY, *assignments):
        command += ["--set", assignment]
    log = state / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
    try:
        yield Started(process, log)
    finally:
        process.kill()
        process.wait()


def test_a_life_under_a_service_manager(model: Path, tmp_path: Path) -> None:
    with (
        NotifySocket(tmp_path) as systemd,
        started(
            model,
            tmp_path,
            *("server.port=0", "engine.hang_timeout=1h", "server.drain_timeout=7s"),
            NOTIFY_SOCKET=systemd.address,
            WATCHDOG_USEC=str(2_000_000),
        ) as daemon,
    ):
        systemd.wait_for(lambda each: "READY" in each)
        before = systemd.messages.copy()
        assert any("EXTEND_TIMEOUT_USEC" in each for each in before)
        assert before[0]["STATUS"].startswith("loading: ")
        with Client(daemon.url()) as client:
            engine_pid = client.status()["engine"]["pid"]
            # Nothing of it is left for the processes that the daemon starts.
            told = Path(f"/proc/{engine_pid}/environ").read_bytes()
            assert b"NOTIFY_SOCKET" not in told
            assert b"WATCHDOG_USEC" not in told
        systemd.wait_for(lambda each: "serves tiny" in each.get("STATUS", ""))
        systemd.receive(0.1)
        for _ in range(3):
            systemd.wait_for(lambda each: "WATCHDOG" in each, 2)  # also at rest
        os.kill(engine_pid, signal.SIGSTOP)
        systemd.receive(1.0)
        assert [each for each in systemd.receive(2) if "WATCHDOG" in each] == []
        assert httpx2.get(f"{daemon.url()}/health/live").status_code == 200  # the api still lives
        os.kill(engine_pid, signal.SIGCONT)
        systemd.wait_for(lambda each: "WATCHDOG" in each)
        daemon.process.send_signal(signal.SIGHUP)
        systemd.wait_for(lambda each: "RELOADING" in each)
        systemd.wait_for(lambda each: "READY" in each)
        daemon.process.terminate()
        stopping = systemd.wait_for(lambda each: "STOPPING" in each)
        assert stopping["EXTEND_TIMEOUT_USEC"] == str(37_000_000)
        assert daemon.process.wait(60) == 0


def test_an_engine_that_is_replaced_keeps_the_watchdog_quiet(model: Path, tmp_path: Path) -> None:
    with (
        NotifySocket(tmp_path) as systemd,
        started(
            model,
            tmp_path,
            "server.port=0",
            NOTIFY_SOCKET=systemd.address,
            WATCHDOG_USEC=str(2_000_000),
        ) as daemon,
    ):
        systemd.wait_for(lambda each: "READY" in each)
        with Client(daemon.url()) as client:
            os.kill(client.status()["engine"]["pid"], signal.SIGKILL)
            systemd.wait_for(lambda each: each.get("STATUS", "").startswith("restarting"))
            last = time.monotonic()
            while client.readiness()["status"] != "ok":
                if any("WATCHDOG" in each for each in systemd.receive(0.1)):
                    last = time.monotonic()
                assert time.monotonic() - last < 2


@pytest.mark.skipif(
    shutil.which("systemd-socket-activate") is None, reason="systemd is not installed"
)
def test_sockets_of_a_service_manager(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    path = tmp_path / "memd.sock"
    activate = (
        *("systemd-socket-activate", f"--listen=127.0.0.1:{port}", f"--listen={path}"),
        *("--fdname=memd:memd", f"--setenv=PYTHONPATH={os.environ.get('PYTHONPATH', '')}"),
    )
    # The settings name another port, which must stay free.
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        started(
            model, tmp_path, f"server.port={taken.getsockname()[1]}", before=activate
        ) as daemon,
    ):
        daemon.wait_for_log(lambda text: "Listening on" in text)
        # The connection that starts it is answered early, not left hanging while it loads.
        assert httpx2.get(f"http://127.0.0.1:{port}/health/ready", timeout=30).status_code == 503
        text = daemon.wait_for_log(lambda text: "memd serves" in text)
        assert f"at http://127.0.0.1:{port} and unix://{path}" in text
        with Client(f"unix://{path}") as client:
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 2, "ignore_eos": True}
            assert client.complete(body)["usage"]["completion_tokens"] == 2
        daemon.process.terminate()
        assert daemon.process.wait(60) == 0
    assert path.exists()  # it is the service manager's


@pytest.mark.parametrize(
    ("listen", "name", "words"),
    [
        ("0.0.0.0:0", "memd", "server.keys_file must name"),
        ("127.0.0.1:0", "web", "FileDescriptorName=memd"),
    ],
)
def test_sockets_it_does_not_take(
    model: Path, tmp_path: Path, listen: str, name: str, words: str
) -> None:
    host, _, port = listen.partition(":")
    with socket.create_server((host, int(port))) as passed:
        # As a service manager does: descriptor 3, and the pid of the process that is to use it.
        code = (
            "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ['LISTEN_PID'] = "
            "str(os.getpid()); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
        )
        fd = passed.fileno()
        command = [sys.executable, "-c", code, str(fd), *SERVE[1:], "--model", str(model)]
        command += ["--state-dir", str(tmp_path / "state")]
        done = subprocess.run(
            command,
            env={**os.environ, "LISTEN_FDS": "1", "LISTEN_FDNAMES": name},
            pass_fds=(fd,),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert words in done.stderr


def test_stacks_in_the_log(model: Path, tmp_path: Path) -> None:
    with started(model, tmp_path, "server.port=0") as daemon:
        url = daemon.url()
        told = httpx2.post(f"{url}/admin/v1/debug/stacks")
        assert told.status_code == 200
        daemon.wait_for_log(lambda text: "tasks of the event loop" in text)
        daemon.wait_for_log(lambda text: 'engine.py", line' in text)
        with Client(url) as client:
            assert client.status()["state"] == "ready"  # the signal has ended nobody
            pid = client.status()["engine"]["pid"]
            # Also when the loop is stuck: the signal itself, without HTTP.
            os.kill(daemon.process.pid, signal.SIGUSR1)
            daemon.wait_for_log(lambda text: text.count("tasks of the event loop") == 2)
            assert client.status()["engine"]["pid"] == pid
