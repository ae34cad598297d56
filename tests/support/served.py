"""A real `memd serve` process on loopback, and the numbers it tells."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

LOOKS_PER_SECOND = 10  # that a daemon answers while nobody else is busy, at least


class Daemon:
    """A running daemon.

    Args:
        process: The api process.
        url: Where it listens.
    """

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.http = httpx2.Client(base_url=url, timeout=120)

    def post(self, path: str, body: Any) -> httpx2.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: object, **more: object) -> dict[str, Any]:
        """A greedy completion; the answer's JSON."""
        name = self.http.get("/v1/models").json()["data"][0]["id"]
        body = {"model": name, "prompt": prompt, "temperature": 0, **more}
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name with these labels; KeyError if there is none."""
        # All of the lines would take the parser longer than the daemon needs to write them.
        lines = self.http.get("/metrics").text.splitlines(keepends=True)
        told = "".join(line for line in lines if line.startswith(name))
        found = [
            sample.value
            for family in text_string_to_metric_families(told)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        if not found:
            raise KeyError(name)
        return sum(found)

    def settings(self, reason: str = "test", **changes: str) -> httpx2.Response:
        """Change settings; double underscores stand for dots."""
        revision = self.http.get("/admin/v1/settings").json()["revision"]
        keys = {key.replace("__", "."): value for key, value in changes.items()}
        body = {"revision": revision, "reason": reason, "changes": keys}
        return self.http.patch("/admin/v1/settings", json=body)

    def wait_until(self, met: Any, seconds: float, what: str) -> None:
        """Wait so long, and on a machine on which others starve the daemon, up to five times."""
        started_at, looks = time.monotonic(), 0
        while not met():
            passed = time.monotonic() - started_at
            slow = looks < seconds * LOOKS_PER_SECOND and passed < 5 * seconds
            assert passed < seconds or slow, f"not in {passed:.1f} s: {what}"
            time.sleep(0.02)
            looks += 1

    def assert_idle(self, seconds: float = 60) -> None:
        """Within so long nothing runs or is held, and an audit finds nothing."""
        self.wait_until(
            lambda: self.metric("memd_pool_pages", state="active") == 0, seconds, "no page in use"
        )
        assert self.metric("memd_requests_running") == 0
        assert self.metric("memd_requests_waiting") == 0
        audit = self.post("/admin/v1/pool/audit", {}).json()
        assert audit["clean"], audit
        states = ("active", "cached", "pinned", "quarantined", "free")
        pages = sum(self.metric("memd_pool_pages", state=state) for state in states)
        assert pages == self.metric("memd_pool_capacity_pages")


@contextmanager
def serving(
    state_dir: Path,
    model: str,
    *assignments: str,
    exit_code: int = 0,
    port: int = 0,
    config: Path | None = None,
) -> Iterator[Daemon]:
    """Start `memd serve`, on a free port or this one; stop it with SIGTERM, check how it leaves."""
    command = [sys.executable, "-m", "memd.cli", "serve", "--model", model, "--port", str(port)]
    command += ["--state-dir", str(state_dir)]
    command += ["--config", str(config)] if config else []
    for assignment in assignments:
        command += ["--set", assignment]
    log = (state_dir / "log").open("w+")
    # As many threads as cores, in each of several daemons, would wait for one another.
    environment = {**os.environ, "MEMD_ENGINE_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # printed when it is ready; empty when it ended
        assert "memd serves" in line, (state_dir / "log").read_text()
        with_url = Daemon(process, line.split()[-1])
        yield with_url
        with_url.http.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == exit_code
    finally:
        process.kill()
        process.wait()
        log.close()
