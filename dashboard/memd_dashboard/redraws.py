"""Parts of a page that ask to be drawn again are drawn at the right moment, or not at all.

Streamlit runs such a request after the new page when its page has just been left. It then tells the
browser that the page of before is back, and the browser empties the new one; what is drawn into it
has no place ("Bad delta path"). So these requests are dropped. And a request that comes while a run
of the script is ending begins another run, from which on Streamlit ignores what the one before has
still to say: the browser never learns of places that the part is then drawn into. So it waits.

Nor does a part that begins throw away what the run before drew of it and the browser has not got
yet, as Streamlit would: told that this run is over, the browser takes the part off the page as one
that was not drawn, what is below it moves up, and the parts within that have no place then.
"""

import asyncio
from collections.abc import Callable
from functools import wraps
from weakref import WeakKeyDictionary

from streamlit.proto.ClientState_pb2 import ClientState
from streamlit.runtime.app_session import AppSession
from streamlit.runtime.scriptrunner_utils.script_requests import ScriptRequestType

Request = Callable[[AppSession, ClientState | None], None]
Clear = Callable[[AppSession, list[str] | None], None]

WAIT_SECONDS = 0.01
MOST_WAITS = 500  # a run that does not end by then is not waited for


def without_left_pages(request_rerun: Request) -> Request:
    """Streamlit's method of a session that takes what the browser asks for, with these rules."""
    pages: WeakKeyDictionary[AppSession, str] = WeakKeyDictionary()  # asked for last, by session

    def draw_part(session: AppSession, client_state: ClientState, waits: int = 0) -> None:
        page = client_state.page_script_hash
        if page and pages.get(session) and pages[session] != page:
            return
        if _is_ending(session) and waits < MOST_WAITS:
            loop = asyncio.get_running_loop()
            loop.call_later(WAIT_SECONDS, draw_part, session, client_state, waits + 1)
        else:
            request_rerun(session, client_state)

    @wraps(request_rerun)
    def guarded(session: AppSession, client_state: ClientState | None) -> None:
        if client_state is not None and client_state.fragment_id:
            draw_part(session, client_state)
            return
        if client_state is not None:
            pages[session] = client_state.page_script_hash
        request_rerun(session, client_state)

    return guarded


def _is_ending(session: AppSession) -> bool:
    """Whether the session's run of the script takes no more requests and is not over yet."""
    runner = session._scriptrunner
    return runner is not None and runner._requests._state is ScriptRequestType.STOP


def keeping_drawn(clear_queue: Clear) -> Clear:
    """Streamlit's method of a session that begins a run by forgetting what is not sent yet."""

    @wraps(clear_queue)
    def cleared(session: AppSession, fragment_ids_this_run: list[str] | None = None) -> None:
        clear_queue(session, None if fragment_ids_this_run is None else [])

    return cleared


def install() -> None:
    """For all sessions of this process, once."""
    if not hasattr(AppSession.request_rerun, "__wrapped__"):
        guarded = without_left_pages(AppSession.request_rerun)
        AppSession.request_rerun = guarded  # type: ignore[method-assign, assignment]
        keeping = keeping_drawn(AppSession._clear_queue)
        AppSession._clear_queue = keeping  # type: ignore[method-assign, assignment]
