"""`memd top` in a real terminal, beside a daemon that goes away and comes back."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from served import serving
from tiny import write_model

pytestmark = pytest.mark.slow

TINY = ("memory.limit=4096 tokens", "engine.device=cpu")


class Terminal:
    """A program in a terminal, and what it has written there."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self.text = ""
        self._master = master

    def resize(self, columns: int, rows: int) -> None:
        """As a window does: the size, then the signal."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def read(self, seconds: float) -> str:
        """What it writes in that time."""
        deadline, came = time.monotonic() + seconds, b""
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._master], [], [], left)[0]:
                break
            try:
                came += os.read(self._master, 65536)
            except OSError:  # it has ended
                break
        self.text += came.decode(errors="replace")
        return came.decode(errors="replace")

    def wait_for(self, words: str, seconds: float = 60) -> None:
        """Until it writes them; what was written before does not count."""
        deadline, came = time.monotonic() + seconds, ""
        while words not in came:
            assert time.monotonic() < deadline, f"{words!r} is not in {came[-2000:]!r}"
            came += self.read(0.1)

    def end(self, seconds: float = 60) -> int:
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read(0.1)
        self.read(0.1)
        return self.process.wait(1)


@contextmanager
def top(url: str, **environment: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def take_terminal() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where tests run in the background
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    # A size in the environment would go before that of the terminal.
    inherited = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "memd.cli", "top", "--every", "200ms", "--url", url],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=take_terminal,
        env={**inherited, "TERM": "xterm", **environment},
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = write_model(tmp_path_factory.mktemp("models") / "tiny")
    return directory


def test_a_daemon_that_goes_away_and_comes_back(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(model), *TINY) as daemon:
        url, port = daemon.url, int(daemon.url.rpartition(":")[2])
        context = top(url)
        terminal = context.__enter__()
        terminal.wait_for("memd tiny")
        terminal.wait_for("ready")
        daemon.complete("hello", max_tokens=30, ignore_eos=True)
        terminal.wait_for("cached 1.")
        terminal.resize(120, 40)
        terminal.read(1.0)
        widest = max(len(line) for line in lines(terminal.read(1.0)))
        assert 80 < widest <= 120
        terminal.resize(50, 20)
        terminal.read(1.0)
        assert max(len(line) for line in lines(terminal.read(1.0))) <= 50
        terminal.resize(80, 24)
    terminal.wait_for("unreachable since")
    with serving(tmp_path, str(model), *TINY, port=port):
        terminal.wait_for("ready")
        terminal.press("q")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.text
        context.__exit__(None, None, None)


def test_ctrl_c_and_no_colour(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(model), *TINY) as daemon, top(daemon.url, NO_COLOR="1") as terminal:
        terminal.wait_for("tokens/s")
        terminal.press("\x03")
        assert terminal.end() == 130
        assert "Traceback" not in terminal.text
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.text)
        # Cursor and screen are given back.
        assert terminal.text.rindex("\x1b[?25h") > terminal.text.rindex("\x1b[?25l")
        assert "\x1b[?1049l" in terminal.text


def lines(text: str) -> list[str]:
    """What stands in each line of the screens that were drawn."""
    text = text.replace("\x1b[H", "\n")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "").split("\n")
