"""What a page asks for after it has been left."""

import pytest

pytest.importorskip("streamlit")
from memd_dashboard.left_pages import install, without_left_pages
from streamlit.proto.ClientState_pb2 import ClientState
from streamlit.runtime.app_session import AppSession


class Session:
    """Takes what gets through."""

    def __init__(self):
        self.taken = []


request = without_left_pages(lambda session, state: session.taken.append(state))


def ask(session, page="", fragment=""):
    before = len(session.taken)
    request(session, ClientState(page_script_hash=page, fragment_id=fragment))
    return len(session.taken) > before


def test_a_part_of_the_page_that_is_open_is_drawn():
    session = Session()
    assert ask(session)  # the first visit, of the page by its path
    assert ask(session, "overview", "strip")
    assert ask(session, "tuning")
    assert ask(session, "tuning", "strip")


def test_a_part_of_the_page_before_is_not_and_other_sessions_are_their_own():
    session, other = Session(), Session()
    assert ask(other, "overview")
    assert ask(session, "overview")
    assert ask(session, "tuning")
    assert not ask(session, "overview", "strip")
    assert ask(other, "overview", "strip")
    assert ask(session, "overview"), "one may go back"
    assert ask(session, "overview", "strip")
    assert not ask(session, "tuning", "strip")


def test_a_request_without_a_state_is_taken():
    session = Session()
    request(session, None)
    assert session.taken == [None]


def test_it_is_installed_once():
    install()
    method = AppSession.request_rerun
    install()
    assert AppSession.request_rerun is method
