"""Parts of a page that ask to be drawn again when the page has just been left are not drawn.

Streamlit runs such a request after the new page. It then tells the browser that the page of before
is back, and the browser empties the new one; what is drawn into it has no place ("Bad delta path").
"""

from collections.abc import Callable
from functools import wraps
from weakref import WeakKeyDictionary

from streamlit.proto.ClientState_pb2 import ClientState
from streamlit.runtime.app_session import AppSession

Request = Callable[[AppSession, ClientState | None], None]


def without_left_pages(request_rerun: Request) -> Request:
    """Streamlit's method of a session that takes what the browser asks for, with that rule."""
    pages: WeakKeyDictionary[AppSession, str] = WeakKeyDictionary()  # asked for last, by session

    @wraps(request_rerun)
    def guarded(session: AppSession, client_state: ClientState | None) -> None:
        if client_state is not None:
            page = client_state.page_script_hash
            if not client_state.fragment_id:
                pages[session] = page
            elif page and pages.get(session) and pages[session] != page:
                return
        request_rerun(session, client_state)

    return guarded


def install() -> None:
    """For all sessions of this process, once."""
    if not hasattr(AppSession.request_rerun, "__wrapped__"):
        guarded = without_left_pages(AppSession.request_rerun)
        AppSession.request_rerun = guarded  # type: ignore[method-assign, assignment]
