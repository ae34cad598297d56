"""Answers of a daemon under load, as recorded, and an HTTP server that gives them.

The server can be slow, hang or go away, and can tell of a pool of any size.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_FILE = Path(__file__).parents[1] / "unit" / "dashboard" / "recorded.json"


def answers() -> dict[str, Any]:
    """By path; /metrics as text. A fresh copy, to be changed."""
    recorded: dict[str, Any] = json.loads(_FILE.read_text())
    recorded["/metrics"] = "\n".join([*recorded["/metrics"], ""])
    return recorded


def enlarge(given: dict[str, Any], blocks: int, requests: int) -> None:
    """Repeat what was recorded until there are so many blocks and open requests."""
    listing = given["/admin/v1/pool/blocks"]
    columns = listing["columns"]
    listing["total"] = blocks
    for name, column in columns.items():
        columns[name] = (column * (blocks // len(column) + 1))[:blocks]
    columns["block"] = list(range(blocks))
    rows = given["/admin/v1/requests"]["requests"]
    given["/admin/v1/requests"]["requests"] = [
        {**rows[number % len(rows)], "id": f"cmpl-{number}"} for number in range(requests)
    ]


class FakeDaemon:
    """Serves answers on loopback.

    Args:
        answers: By path.

    Attributes:
        hang_seconds: Every answer is held back for so long.
        calls: Path of each request so far.
    """

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.hang_seconds = 0.0
        self.calls: list[str] = []
        self.port = 0
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, at the port of before if there was one."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.answer(self)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Go away: new connections are refused, open ones end with their next request."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = urlsplit(handler.path).path
        self.calls.append(path)
        handler.rfile.read(int(handler.headers.get("content-length", 0)))
        time.sleep(self.hang_seconds)
        if self._server is None:
            handler.close_connection = True
            return
        status, value = 200, self.answers.get(path)
        if value is None:
            fault = {"message": f"GET {path} is not served here", "type": "invalid_request_error"}
            status, value = 404, {"error": {**fault, "param": None, "code": "not_found"}}
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        handler.send_response(status)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


@contextmanager
def fake_daemon(given: dict[str, Any] | None = None) -> Iterator[FakeDaemon]:
    """One that runs."""
    daemon = FakeDaemon(answers() if given is None else given)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()
