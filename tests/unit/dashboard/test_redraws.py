"""What a page asks for after it has been left."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("streamlit")
from memd_dashboard.redraws import install, keeping_drawn, without_left_pages
from streamlit.proto.ClientState_pb2 import ClientState
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.runtime.app_session import AppSession
from streamlit.runtime.forward_msg_queue import ForwardMsgQueue
from streamlit.runtime.scriptrunner_utils.script_requests import ScriptRequests


class Session:
    """Takes what gets through."""

    def __init__(self):
        self.taken = []
        self._scriptrunner = None


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


def test_a_part_waits_until_the_run_that_ends_is_over():
    """Else Streamlit ignores what that run has still to say."""
    session = Session()
    ask(session, "overview")
    requests = ScriptRequests()

    async def part_while_ending():
        session._scriptrunner = SimpleNamespace(_requests=requests)
        assert ask(session, "overview", "strip"), "a run that goes on takes requests"
        requests.request_stop()
        assert not ask(session, "overview", "strip")
        await asyncio.sleep(0.05)
        assert len(session.taken) == 2
        session._scriptrunner = None
        for _ in range(3000):
            await asyncio.sleep(0.01)
            if len(session.taken) == 3:
                break

    asyncio.run(asyncio.wait_for(part_while_ending(), 30))
    assert session.taken[-1].fragment_id == "strip"


def test_a_part_that_waits_is_not_drawn_once_its_page_is_left():
    session, requests = Session(), ScriptRequests()
    ask(session, "overview")

    async def left_meanwhile():
        session._scriptrunner = SimpleNamespace(_requests=requests)
        requests.request_stop()
        assert not ask(session, "overview", "strip")
        assert ask(session, "tuning")
        session._scriptrunner = None
        await asyncio.sleep(0.1)

    asyncio.run(left_meanwhile())
    assert [state.page_script_hash for state in session.taken] == ["overview", "tuning"]


def test_a_request_without_a_state_is_taken():
    session = Session()
    request(session, None)
    assert session.taken == [None]


def drawn(part: str, text: str) -> ForwardMsg:
    message = ForwardMsg()
    message.metadata.delta_path[:] = [0, 1]
    message.delta.fragment_id = part
    message.delta.new_element.text.body = text
    return message


def texts(session) -> list[str]:
    return [message.delta.new_element.text.body for message in session._browser_queue.flush()]


@pytest.mark.parametrize(
    ("clear", "kept"),
    [(AppSession._clear_queue, False), (keeping_drawn(AppSession._clear_queue), True)],
    ids=["Streamlit's", "kept"],
)
def test_a_part_that_begins_keeps_what_is_drawn_of_it_and_not_sent(clear, kept):
    """Streamlit's own method does not: the test fails once it does, and the rule can go."""
    session = SimpleNamespace(_browser_queue=ForwardMsgQueue())
    session._browser_queue.enqueue(drawn("strip", "of the page"))
    clear(session, ["strip"])
    session._browser_queue.enqueue(drawn("strip", "again"))
    assert texts(session) == (["of the page", "again"] if kept else ["again"])


def test_a_run_of_the_page_forgets_what_is_not_sent():
    session = SimpleNamespace(_browser_queue=ForwardMsgQueue())
    session._browser_queue.enqueue(drawn("strip", "of the page before"))
    keeping_drawn(AppSession._clear_queue)(session)
    assert texts(session) == []


def test_it_is_installed_once():
    install()
    methods = AppSession.request_rerun, AppSession._clear_queue
    install()
    assert (AppSession.request_rerun, AppSession._clear_queue) == methods
    assert all(hasattr(method, "__wrapped__") for method in methods)
