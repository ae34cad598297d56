"""A server that takes notifications, and an Alertmanager that sends some."""

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

needs_alertmanager = pytest.mark.skipif(
    shutil.which("prometheus-alertmanager") is None,
    reason="Debian's prometheus-alertmanager is not installed",
)


class Webhook:
    """Collects what is posted to it.

    Args:
        url: Where it listens.
        failures: So many posts are answered with 500 and not collected.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[dict[str, Any]] = []
        self.failures = 0

    @property
    def channel(self) -> str:
        """Its URL for apprise."""
        return self.url.replace("http://", "json://")

    def of(self, status: str) -> list[dict[str, Any]]:
        """What Alertmanager sent with this status."""
        return [body for body in self.bodies if body["status"] == status]

    def titled(self, start: str) -> list[dict[str, Any]]:
        """What memd sent with such a title."""
        return [body for body in self.bodies if body["title"].startswith(start)]


@contextmanager
def webhook() -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if hook.failures:
                hook.failures -= 1
                self.send_response(500)
            else:
                hook.bodies.append(body)
                self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hook = Webhook(f"http://127.0.0.1:{server.server_port}/hook")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hook
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


@contextmanager
def alertmanager(directory: Path, hook: Webhook) -> Iterator[str]:
    """Run an Alertmanager that tells `hook` of everything at once. Yields its URL."""
    directory.mkdir(parents=True)
    route = {
        "receiver": "hook",
        "group_by": ["alertname"],
        "group_wait": "0s",
        "group_interval": "4s",
        "repeat_interval": "4h",
    }
    receivers = [{"name": "hook", "webhook_configs": [{"url": hook.url, "send_resolved": True}]}]
    (directory / "config.yml").write_text(json.dumps({"route": route, "receivers": receivers}))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    command = ["prometheus-alertmanager", f"--config.file={directory / 'config.yml'}"]
    command += [f"--storage.path={directory / 'data'}", "--cluster.listen-address="]
    command += [f"--web.listen-address={url.removeprefix('http://')}", "--log.level=warn"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while not _is_ready(url):
                assert process.poll() is None, (directory / "log").read_text()
                assert time.monotonic() < deadline, "Alertmanager is not ready in 60 s"
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        return bool(httpx2.get(f"{url}/-/ready").status_code == 200)
    except httpx2.HTTPError:
        return False
