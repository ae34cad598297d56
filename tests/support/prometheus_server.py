"""A real Prometheus on loopback, in a directory of its own."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Debian's prometheus is not installed",
)


class Prometheus:
    """A running server that scrapes every second.

    Args:
        url: Where it listens.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx2.Client(base_url=url, timeout=30)

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """An instant vector. AssertionError: the expression is wrong."""
        parameters = {"query": expression} | ({} if at is None else {"time": str(at)})
        answer = self.http.get("/api/v1/query", params=parameters).json()
        assert answer["status"] == "success", (expression, answer)
        return list(answer["data"]["result"])

    def value(self, expression: str) -> float:
        """The one value of an expression."""
        (sample,) = self.query(expression)
        return float(sample["value"][1])

    def get(self, path: str) -> Any:
        """The data of another part of the API, such as `rules`."""
        return self.http.get(f"/api/v1/{path}").json()["data"]

    def wait_until(self, met: Any, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not met():
            assert time.monotonic() < deadline, f"not in {seconds} s: {what}"
            time.sleep(0.2)


@contextmanager
def scraping(
    directory: Path,
    target_url: str,
    rules: Sequence[Path] = (),
    alertmanager_url: str | None = None,
    others: Mapping[str, str] | None = None,
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes one daemon under the job `memd`.

    Args:
        directory: Its files.
        target_url: Of the daemon.
        rules: Rule files, evaluated every second.
        alertmanager_url: Who is told of alerts.
        others: More targets, job: address.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [_address(url)]}]}
            for job, url in {"memd": target_url, **(others or {})}.items()
        ],
    }
    if alertmanager_url is not None:
        managers = [{"static_configs": [{"targets": [_address(alertmanager_url)]}]}]
        config["alerting"] = {"alertmanagers": managers}
    (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["prometheus", f"--config.file={directory / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={directory / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (directory / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            server.wait_until(lambda: _is_ready(server, process), 60, "Prometheus is ready")
            yield server
            server.http.close()
        finally:
            process.terminate()
            process.wait(60)


def _address(url: str) -> str:
    return url.removeprefix("http://").rstrip("/")


def _is_ready(server: Prometheus, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "Prometheus did not start"
    try:
        return bool(server.http.get("/-/ready").status_code == 200)
    except httpx2.HTTPError:
        return False
