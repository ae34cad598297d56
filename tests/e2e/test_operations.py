"""docs/operations.md: its commands run in order, as a newcomer types them, with a tiny model.

A fenced block says how it is run: `console` in the newcomer's shell, `console daemon` in a terminal
of its own, in the place of the daemon before. Blocks marked with another word are skipped and say
so. A command that is to fail carries a comment with its exit code.
"""

import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from memd_alerts.rules import RULES_FILE
from tiny import write_model

from memd.cli import app

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
SKIPPED = {
    "root": "needs root",
    "docker": "needs a container engine or a cluster",
    "install": "installs from the network; `make test` has done it",
}
_FENCE = re.compile(r"^```console(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ENDS_WITH = re.compile(r"#\s*ends with (\d+)$")
_END = "memd-test-end-of-command"


class Block(NamedTuple):
    """One fenced block."""

    line: int
    mark: str
    commands: list[str]


def blocks() -> list[Block]:
    text = PAGE.read_text()
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(_FENCE.findall(text))
    found = []
    for match in _FENCE.finditer(text):
        lines = match[2].splitlines()
        assert all(line.startswith("$ ") for line in lines), lines
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(line, match[1] or "", [each.removeprefix("$ ") for each in lines]))
    return found


BLOCKS = blocks()


class Webhook:
    """What the newcomer's channel leads to."""

    def __init__(self) -> None:
        self.bodies: list[str] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                hook.bodies.append(self.rfile.read(length).decode())
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Terminal:
    """The newcomer's shell, and the other terminal with the daemon.

    Args:
        home: Empty.
        webhook: Stands for the address on the page.
        environment: Of both.
    """

    def __init__(self, home: Path, webhook: Webhook, environment: dict[str, str]) -> None:
        self.webhook = webhook
        self.broken = False
        self._home = home
        self._environment = environment
        self._log = home / "daemon.log"
        self._daemon: subprocess.Popen[bytes] | None = None
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=home,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, command: str, seconds: float = 150) -> tuple[int, str]:
        """Exit code and output."""
        command = command.replace("127.0.0.1:9999", f"127.0.0.1:{self.webhook.port}")
        command = command.replace("evaluate_every: 5s", "evaluate_every: 1s")
        command = command.replace("sleep 5", "sleep 0.5")
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{command}\ncode=$?; echo; echo {_END} $code\n".encode())
        self._shell.stdin.flush()
        output, deadline = b"", time.monotonic() + seconds
        while not (end := re.search(rf"\n{_END} (\d+)\n".encode(), output)):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._shell.stdout], [], [], left)[0]:
                raise AssertionError(f"{command!r} takes too long: {output!r}")
            piece = os.read(self._shell.stdout.fileno(), 65536)
            assert piece, f"the shell ended: {output!r}"
            output += piece
        return int(end[1]), output[: end.start()].decode(errors="replace")

    def restart(self, command: str) -> None:
        """The daemon's terminal: Ctrl-C, and another command."""
        self.stop_daemon()
        with self._log.open("ab") as log:
            self._daemon = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self._home,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop_daemon(self) -> None:
        if self._daemon is not None:
            self._daemon.send_signal(signal.SIGINT)
            assert self._daemon.wait(60) == 0, self.log()
            self._daemon = None

    def log(self) -> str:
        return self._log.read_text()[-4000:]

    def close(self) -> None:
        try:
            self.stop_daemon()
        finally:
            if self._daemon is not None:
                self._daemon.kill()
            self._shell.kill()
            self._shell.wait()


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    home = tmp_path_factory.mktemp("home")
    program = home / "bin" / "memd"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom memd.cli import main\nmain()\n")
    program.chmod(0o755)
    hasty = home / "rules.yml"
    before, name, after = RULES_FILE.read_text().partition("- name: MemdConfigReloadFailed")
    hasty.write_text(before + name + after.replace("for: 1m", "for: 2s", 1))
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if "MEMD" not in key} | {
        "HOME": str(home),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(home / ".local/state"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "SHELL": "/bin/bash",
        # In the place of the default address, model and memory.
        "MEMD_URL": f"http://127.0.0.1:{port}",
        "MEMD_SERVER_PORT": str(port),
        "MEMD_MODEL_PATH": str(write_model(home / "models" / "tiny")),
        "MEMD_MEMORY_LIMIT": "4096 tokens",
        "MEMD_ENGINE_THREADS": "1",
        "MEMD_ENGINE_DEVICE": "cpu",
        # The alert of the page is pending for seconds and not for a minute.
        "MEMD_ALERTS_RULES": str(hasty),
    }
    webhook = Webhook()
    newcomer = Terminal(home, webhook, environment)
    yield newcomer
    newcomer.close()
    webhook.close()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line-{block.line}-{block.mark}")
def test_commands_of_the_page(terminal: Terminal, block: Block) -> None:
    if block.mark in SKIPPED:
        pytest.skip(SKIPPED[block.mark])
    if terminal.broken:
        pytest.skip("a block before it failed")
    terminal.broken = True
    if block.mark == "daemon":
        (command,) = block.commands
        terminal.restart(command)
    else:
        assert block.mark == "", f"unknown mark {block.mark!r}"
        for command in block.commands:
            expected = _ENDS_WITH.search(command)
            code, output = terminal.run(command)
            wanted = int(expected[1]) if expected else 0
            assert code == wanted, f"{command}\n{output}\n{terminal.log()}"
            assert "Traceback" not in output
    terminal.broken = False


def test_the_newcomer_has_been_told(terminal: Terminal) -> None:
    """After the page: the test message, and the alert; its end was silenced."""
    if terminal.broken:
        pytest.skip("a block failed")
    bodies = terminal.webhook.bodies
    assert any("MemdConfigReloadFailed" in body for body in bodies), bodies
    assert len(bodies) >= 2


def commands(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, node
    for name, child in getattr(node, "commands", {}).items():
        yield from commands(child, (*path, name))


def test_commands_within_the_text_exist() -> None:
    """`memd …` in running text is not run; its words and options must be real."""
    known = dict(commands(typer.main.get_command(app)))
    text = _FENCE.sub("", PAGE.read_text())
    for code in set(re.findall(r"`(memd [^`]*)`", text)):
        words = shlex.split(code)[1:]
        path: tuple[str, ...] = ()
        while words and (*path, words[0]) in known:
            path = (*path, words.pop(0))
        assert path, code
        options = {option for each in known[path].params for option in each.opts}
        assert {word for word in words if word.startswith("--")} <= options, code


def test_links_lead_somewhere() -> None:
    text = PAGE.read_text()
    headings = {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("http"):
            assert (PAGE.parent / target).exists(), target
