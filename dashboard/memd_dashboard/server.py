"""The server of the pages, as Streamlit's command line finds it: the app, and how a page begins."""

from contextlib import suppress
from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memd_dashboard.ui import FIRST_PAGE, PAGES

# Streamlit looks for its server under the address of the page first, where there is none, and the
# browser reports each miss as an error. Relative, so that it holds behind a proxy's prefix too.
_WHERE = (
    "<script>window.__streamlit = {BACKEND_BASE_URL: new URL('./', location.href).href}</script>"
)


def page_routes(base_path: str) -> list[Route]:
    """What answers a first visit of each page by its own path: Streamlit's, told where it is.

    The first page has the path of the server itself.

    Args:
        base_path: The path that the server is reached at (`server.baseUrlPath`).
    """
    index = (Path(st.__file__).with_name("static") / "index.html").read_text()
    told = index.replace("<head>", f"<head>{_WHERE}", 1)

    async def first_answer(_: Request) -> HTMLResponse:
        return HTMLResponse(told, headers={"Cache-Control": "no-cache"})

    async def to_root(request: Request) -> RedirectResponse:
        return RedirectResponse(f"./?{request.url.query}".rstrip("?"))

    prefix = f"/{stripped}" if (stripped := base_path.strip("/")) else ""
    return [
        Route(f"{prefix}/{path}", to_root if path == FIRST_PAGE else first_answer)
        for pages in PAGES.values()
        for path in pages
    ]


def without_leavers(app: ASGIApp) -> ASGIApp:
    """Let Streamlit learn that a browser has left from what it receives, and only there.

    Where it fails to send first, and the browser asked for something before it left, Streamlit
    takes the connection for one that broke its rules, and an exception ends up in the log.
    """

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_if_there(message: Message) -> None:
            with suppress(OSError):
                await send(message)

        await app(scope, receive, send_if_there if scope["type"] == "websocket" else send)

    return served


app = st.App(
    Path(__file__).with_name("app.py"),
    routes=page_routes(st.get_option("server.baseUrlPath")),
    middleware=[Middleware(without_leavers)],
)
