"""`memd dashboard` and `memd up`: a process of its own, that ends with its owner."""

import asyncio
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from memd_dashboard.server import app, page_routes, without_leavers
from memd_dashboard.ui import FIRST_PAGE, PAGES
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnected
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.web.server.starlette.starlette_websocket import create_websocket_handler

from memd.cli import dashboard

KEY = "sk-of-the-operator"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(url):
    try:
        return httpx2.get(f"{url}/_stcore/health").status_code == 200
    except httpx2.TransportError:
        return False


def until_it_answers(url):
    deadline = time.monotonic() + 60
    while not answers(url):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize(("host", "lent"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_the_key_is_lent_on_loopback_only_and_is_in_no_command_line(monkeypatch, host, lent):
    monkeypatch.setenv("MEMD_API_KEY", KEY)
    process = dashboard.start("http://127.0.0.1:1", host, free_port())
    try:
        proc = Path(f"/proc/{process.pid}")
        deadline = time.monotonic() + 60
        while b"streamlit" not in (proc / "cmdline").read_bytes():
            assert time.monotonic() < deadline
        assert (KEY.encode() in (proc / "environ").read_bytes()) is lent
        assert b"MEMD_URL=http://127.0.0.1:1" in (proc / "environ").read_bytes()
        assert KEY.encode() not in (proc / "cmdline").read_bytes()
    finally:
        dashboard.stop(process)
    assert process.returncode is not None


def test_beside_a_daemon_it_takes_another_port_when_the_usual_one_is_busy():
    with socket.socket() as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            busy.bind(("127.0.0.1", dashboard.PORT))
        except OSError:
            pass  # something else of this machine has it: as good
        else:
            busy.listen()
        with dashboard.beside("http://127.0.0.1:1", wanted=True) as url:
            assert url is not None
            assert not url.endswith(f":{dashboard.PORT}")
            until_it_answers(url)
    assert not answers(url)


def test_it_is_not_started_when_it_is_not_wanted():
    with dashboard.beside("http://127.0.0.1:1", wanted=False) as url:
        assert url is None


@pytest.mark.parametrize(
    ("base_path", "root"), [("", "/"), ("/", "/"), ("ops/memd", "/ops/memd/"), ("/ops/", "/ops/")]
)
def test_a_first_visit_of_any_page_is_told_where_the_server_is(base_path, root):
    """Else the browser looks for it under the page, and reports errors."""
    http = TestClient(Starlette(routes=page_routes(base_path)), follow_redirects=False)
    for path in (path for pages in PAGES.values() for path in pages if path != FIRST_PAGE):
        for _ in range(2):
            answer = http.get(f"{root}{path}?key=value")
            assert answer.status_code == 200
            assert "BACKEND_BASE_URL: new URL('./', location.href)" in answer.text
            assert answer.text.index("BACKEND_BASE_URL") < answer.text.index("<script type=")
            assert "max-age" not in answer.headers["Cache-Control"]
    first = http.get(f"{root}{FIRST_PAGE}?key=value")
    assert first.next_request.url.copy_with(query=None).path == root
    assert first.next_request.url.query == b"key=value"


async def leave_while_sent_to(wrap) -> list[str]:
    """What Streamlit's end of a connection does when it fails to send, and then hears something."""
    done: list[str] = []
    lost = asyncio.Event()
    asked = iter(("websocket.connect", "websocket.receive", "websocket.disconnect"))

    async def receive():
        message = {"type": next(asked), "code": 1001}
        if message["type"] == "websocket.receive":
            await lost.wait()
            message["bytes"] = BackMsg(rerun_script={}).SerializeToString()
        return message

    async def send(message):
        if message["type"] == "websocket.send":
            lost.set()
            raise OSError("the browser has left")

    def connect(client, **_):
        client.write_forward_msg(ForwardMsg())
        return "session"

    streamlit = SimpleNamespace(
        connect_session=connect,
        handle_backmsg=lambda *_, **__: done.append("heard"),
        disconnect_session=lambda *_, **__: done.append("ended"),
    )
    handler = create_websocket_handler(streamlit)

    async def served(scope, receive, send):
        await handler(WebSocket(scope, receive, send))

    scope = {"type": "websocket", "path": "/", "headers": [], "query_string": b"", "client": None}
    await asyncio.wait_for(wrap(served)(scope, receive, send), 30)
    return done


def test_a_browser_that_leaves_while_it_is_sent_to_is_no_error():
    assert without_leavers in [each.cls for each in app._user_middleware]
    assert asyncio.run(leave_while_sent_to(without_leavers)) == ["heard", "ended"]


def test_streamlit_needs_that_still():
    with pytest.raises(WebSocketDisconnected):
        asyncio.run(leave_while_sent_to(lambda served: served))
