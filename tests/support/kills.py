"""Streams that must not notice what happens to the engine, and ways to make it happen."""

import contextlib
import json
import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from served import Daemon


@dataclass
class Stream:
    """What one streamed completion gave, to a client that may leave after so many tokens."""

    leaves_after: int | None = None
    id: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int | None = None
    pings: int = 0
    error: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def read(self, url: str, body: dict[str, Any]) -> None:
        """Run the request to its end."""
        with (
            httpx2.Client(base_url=url, timeout=300) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            if response.status_code != 200:
                self.error = response.read().decode()
                return
            rest = b""
            for piece in response.iter_bytes():  # iter_lines would also split at U+0085 and others
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self._take_line(line)
                if self.leaves_after is not None and len(self.token_ids) >= self.leaves_after:
                    return

    def _take_line(self, line: bytes) -> None:
        self.pings += line.startswith(b": ping")
        if line.startswith(b"data: {"):
            self._take(json.loads(line.removeprefix(b"data: ")))

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
            return
        self.id = event["id"]
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.token_ids += choice.get("token_ids") or []
            self.text += choice["text"]
            if choice.get("logprobs"):
                self.logprobs += choice["logprobs"]["token_logprobs"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason


def run_streams(url: str, bodies: list[dict[str, Any]]) -> tuple[list[Stream], list[Any]]:
    """Start one thread for each body; join them to have the streams complete."""
    streams = [Stream() for _ in bodies]
    threads = [
        threading.Thread(target=stream.read, args=(url, body), daemon=True)
        for stream, body in zip(streams, bodies, strict=True)
    ]
    for thread in threads:
        thread.start()
    return streams, threads


def engine_pid(daemon: Daemon) -> int | None:
    """Of the engine that serves now; None while there is none."""
    pid = daemon.http.get("/admin/v1/status").json()["engine"]["pid"]
    return None if pid is None else int(pid)


def wait_for_engine(daemon: Daemon, other_than: int | None = None, seconds: float = 60) -> int:
    """The pid of an engine that serves."""
    daemon.wait_until(
        lambda: engine_pid(daemon) not in (None, other_than), seconds, "another engine"
    )
    pid = engine_pid(daemon)
    assert pid is not None
    return pid


def kill_engine(daemon: Daemon, number: int = signal.SIGKILL) -> int:
    """Send a signal to the engine that serves. Returns its pid."""
    pid = wait_for_engine(daemon)
    os.kill(pid, number)
    return pid


def engine_process(daemon: Daemon) -> int | None:
    """The pid of the engine process, whatever it does; None while there is none."""
    parent = daemon.process.pid
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"memd.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    return None


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
