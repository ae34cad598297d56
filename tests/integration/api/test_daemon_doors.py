"""How a real daemon listens: Unix socket, keys, and what it refuses to start with."""

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import httpx2
import pytest
from tiny import write_model

from memd.client import Client, ClientError
from memd.keys import SCOPES, KeysFile, make_key

NUMBERS = count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = write_model(tmp_path_factory.mktemp("models") / "tiny")
    return directory


def start(model: Path, *assignments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "memd.cli", "serve", "--model", str(model)]
    command += ["--state-dir", str(model.parent / f"state-{next(NUMBERS)}")]
    for assignment in ("memory.limit=4096 tokens", "engine.threads=1", *assignments):
        command += ["--set", assignment]
    environment = {key: value for key, value in os.environ.items() if "MEMD" not in key}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@contextmanager
def serving(model: Path, *assignments: str) -> Iterator[str]:
    """The URLs it says it serves at; it must leave well."""
    process = start(model, *assignments)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "memd serves tiny at " not in line:
            raise AssertionError(process.communicate()[1])
        yield line.partition(" at ")[2].strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def memd(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memd.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_a_unix_socket_instead_of_tcp(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "memd.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    url = f"unix://{path}"
    with serving(model, "server.host=null", f"server.uds={path}", "server.uds_mode=0600") as at:
        assert at == url
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert memd("--help").returncode == 0
        status = memd("status", "--check", "--url", url)
        assert status.returncode == 0, status.stderr
        assert memd("generate", "hi", "--url", url, "--max-tokens", "3").returncode == 0
        with Client(url) as client:
            chunks = list(client.stream_complete({"model": "tiny", "prompt": "hi"}))
            assert chunks[-1]["usage"]["completion_tokens"] > 0
        second = start(model, "server.host=null", f"server.uds={path}")
        assert second.wait(60) == 1
        assert "a process answers there already" in second.communicate()[1]
        assert memd("status", "--url", url).returncode == 0
    assert not path.exists()
    gone = memd("status", "--url", url)
    assert gone.returncode == 3
    assert url in gone.stderr


def test_both_with_keys(model: Path, tmp_path: Path) -> None:
    path, file = tmp_path / "memd.sock", tmp_path / "keys.jsonl"
    added = memd("keys", "add", "all", "--scopes", ",".join(SCOPES), "--file", str(file))
    key = added.stdout.strip()
    doors = ("server.host=0.0.0.0", "server.port=0", f"server.uds={path}")
    with serving(model, *doors, f"server.keys_file={file}") as at:
        tcp, uds = at.split(" and ")
        assert uds == f"unix://{path}"
        tcp = tcp.replace("0.0.0.0", "127.0.0.1")
        assert httpx2.get(f"{tcp}/health/ready").status_code == 200
        for url in (tcp, uds):
            refused = memd("status", "--url", url)
            assert refused.returncode == 4
            assert "API key" in refused.stderr
            assert memd("status", "--url", url, MEMD_API_KEY=key).returncode == 0
            with Client(url, key) as client:
                body = {"model": "tiny", "prompt": "hi", "max_tokens": 4, "ignore_eos": True}
                assert client.complete(body)["usage"]["completion_tokens"] == 4
        assert memd("keys", "revoke", "all", "--file", str(file)).returncode == 0
        with Client(tcp, key) as client, pytest.raises(ClientError) as error:
            client.status()
        assert error.value.status == 401


@pytest.mark.parametrize(
    ("assignments", "code", "words"),
    [
        (["server.host=0.0.0.0"], 2, "server.keys_file"),
        (["server.host=null"], 2, "nothing to listen at"),
        (["server.port=0", "server.keys_file={tmp}/none"], 1, "{tmp}/none cannot be read"),
        (["server.port=0", "server.keys_file={tmp}/bad"], 1, "{tmp}/bad, line 2"),
        (["server.host=null", "server.uds={tmp}/bad"], 1, "a file that is no socket"),
    ],
)
def test_what_it_does_not_start_with(
    model: Path, tmp_path: Path, assignments: list[str], code: int, words: str
) -> None:
    KeysFile(tmp_path / "bad").add(make_key("a", ["inference"], "a", None, None)[1])
    with (tmp_path / "bad").open("a") as file:
        file.write("nonsense\n")
    process = start(model, *(each.format(tmp=tmp_path) for each in assignments))
    assert process.wait(60) == code
    assert words.format(tmp=tmp_path) in process.communicate()[1]
