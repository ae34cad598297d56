"""The life of a real daemon and its engine process, with a tiny random model."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
from tiny import write_model

SERVE = (
    "import sys; from memd import config_sources, daemon;"
    "sys.exit(daemon.serve(config_sources.Sources(None, sys.argv[1:]).read()))"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


class Process:
    """A daemon in a process of its own."""

    def __init__(self, model: Path, *assignments: str) -> None:
        arguments = (
            f"model.path={model}",
            "server.port=0",
            "memory.limit=4096 tokens",
            "engine.device=cpu",
            "engine.threads=1",
            *assignments,
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def ready(self) -> httpx2.Client:
        """A client, once the daemon has said that it serves."""
        line = self.process.stdout.readline()
        assert line.startswith("memd serves tiny at http://127.0.0.1:"), line
        http = httpx2.Client(base_url=line.split()[-1], timeout=30)
        self.engine_pid = http.get("/admin/v1/status").json()["engine"]["pid"]
        return http

    def end(self, *signals: int) -> int:
        """Send signals and wait for the exit code."""
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.2)
        return self.process.wait(60)

    def engine_is_gone(self) -> bool:
        try:
            os.kill(self.engine_pid, 0)
        except ProcessLookupError:
            return True
        return False


def stream_into(http: httpx2.Client, lines: list[str], max_tokens: int) -> threading.Thread:
    """Reads a stream in a thread; returns once the first event has come."""
    body = {
        "model": "tiny",
        "prompt": "hi",
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    begun = threading.Event()

    def read() -> None:
        with (
            contextlib.suppress(httpx2.TransportError),
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            for line in response.iter_lines():
                lines.append(line)
                begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    return thread


def test_a_drain_ends_what_takes_too_long(model):
    with Process(model, "server.drain_timeout=0.3s") as daemon:
        http = daemon.ready()
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 4, "seed": 1, "ignore_eos": True}
        first = http.post("/v1/completions", json=body).json()
        assert first["usage"]["completion_tokens"] == 4
        lines: list[str] = []
        thread = stream_into(http, lines, 4000)
        assert daemon.end(signal.SIGTERM) == 0
        thread.join(60)
        assert lines[-2:] == ["data: [DONE]", ""]
        assert json.loads(lines[-4].removeprefix("data: "))["error"]["code"] == "draining"
        assert daemon.engine_is_gone()


def test_a_second_signal_ends_at_once(model):
    with Process(model) as daemon:
        thread = stream_into(daemon.ready(), [], 4000)
        started = time.monotonic()
        assert daemon.end(signal.SIGTERM, signal.SIGINT) == 0
        assert time.monotonic() - started < 5
        thread.join(60)
        assert daemon.engine_is_gone()


def test_a_model_that_cannot_be_loaded(model, tmp_path):
    with Process(tmp_path / "nothing") as daemon:
        assert daemon.process.wait(60) == 1
        assert "memd: " in daemon.process.stderr.read()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (damaged / name).write_bytes((model / name).read_bytes())
    (damaged / "model.safetensors").write_bytes(b"not tensors")
    with Process(damaged) as daemon:
        assert daemon.process.wait(60) == 1
        assert "model.safetensors" in daemon.process.stderr.read()


def test_an_address_in_use(model):
    from memd.listen import listen

    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with Process(model, f"server.port={port}") as daemon:
            assert daemon.process.wait(60) == 1
            assert f"cannot listen at 127.0.0.1:{port}" in daemon.process.stderr.read()
