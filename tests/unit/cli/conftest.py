"""A stand-in daemon on loopback: real sockets, scripted answers."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from memd.cli import app

Answer = tuple[int, Any]  # a list is streamed as server-sent events


@dataclass
class StandIn:
    """Answers by `METHOD path`, and keeps what was asked."""

    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)  # of the last request
    url: str = ""

    def body_of(self, route: str) -> Any:
        """The body of the last request to a route."""
        return [body for asked, body in self.asked if asked == route][-1]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stand_in: StandIn

    def _answer(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        route = f"{self.command} {self.path}"
        self.stand_in.asked.append((route, body))
        self.stand_in.headers = {name.lower(): value for name, value in self.headers.items()}
        missing = (404, {"error": {"message": f"no {route}", "code": "not_found"}})
        status, answer = self.stand_in.answers.get(route, missing)
        if isinstance(answer, list):
            kind = "text/event-stream"
            data = "".join(
                f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"
                for event in answer
            )
        else:
            kind = "application/json"
            data = answer if isinstance(answer, str) else json.dumps(answer)
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data.encode())))
        self.end_headers()
        self.wfile.write(data.encode())

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def daemon() -> Iterator[StandIn]:
    stand_in = StandIn()
    handler = type("Handler", (_Handler,), {"stand_in": stand_in})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        stand_in.url = f"http://127.0.0.1:{server.server_port}"
        yield stand_in
        server.shutdown()
        thread.join()


@pytest.fixture
def dead_url() -> str:
    """An address where nobody listens."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        return f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def memd(daemon: StandIn, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command against the stand-in."""
    monkeypatch.setenv("MEMD_URL", daemon.url)

    def run(*arguments: str, input: str | None = None) -> Result:
        return CliRunner().invoke(app, list(arguments), input=input)

    return run
