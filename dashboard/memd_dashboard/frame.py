"""What every page has around it: where the data comes from, its age, and how actions are done.

The only module besides the pages that draws with Streamlit.
"""

import hashlib
import html
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import streamlit as st

from memd.client import DEFAULT_URL, Client, ClientError
from memd_dashboard import address, markup, palette, show
from memd_dashboard.feed import Feed, Feeds
from memd_dashboard.snapshot import JSON, Reading, Snapshot

_KEY = "api_key"  # in the session's state
_LIVE = "live"
_QUESTION = "question"

STATE_COLOURS = {
    "ready": palette.GOOD,
    "loading": palette.WARNING,
    "restarting": palette.WARNING,
    "draining": palette.WARNING,
    "failed": palette.BAD,
    "unreachable": palette.BAD,
}

_STYLE = """
.stMainBlockContainer {padding: 3.4rem 2rem 3rem; max-width: 1680px}
.memd-strip {display:flex; flex-wrap:wrap; gap:.35rem 1.4rem; align-items:baseline;
  font-size:.86rem; opacity:.9; margin-bottom:.2rem}
.memd-strip b {font-weight:600}
.memd-dot {display:inline-block; width:.62rem; height:.62rem; border-radius:50%; margin-right:.4rem}
.memd-old {border-left:4px solid #D55E00; padding:.5rem .9rem; border-radius:.3rem;
  background:color-mix(in srgb, #D55E00 12%, transparent); margin:.2rem 0 .4rem}
.memd-note {opacity:.72; font-size:.9rem}
section[data-testid="stSidebar"] {width:13.5rem !important}
div[data-testid="stMetric"] {padding:.2rem 0}
"""
_GREY = ".st-key-page {filter: grayscale(1); opacity: .5; transition: opacity .3s}"


@st.cache_resource
def _feeds() -> Feeds:
    return Feeds()


def url() -> str:
    """Of the daemon."""
    return os.environ.get("MEMD_URL", DEFAULT_URL)


def _lent_key() -> str | None:
    """The key this dashboard was started with, for everyone who can open it."""
    if file := os.environ.get("MEMD_API_KEY_FILE"):
        return Path(file).read_text().strip() or None
    return os.environ.get("MEMD_API_KEY") or None


def feed() -> Feed:
    """The feed of this session's key."""
    return _feeds().of(url(), st.session_state.get(_KEY) or _lent_key())


def snapshot(*topics: str) -> Snapshot:
    """The newest answers to these topics."""
    return feed().snapshot(topics)


def zone() -> tzinfo | None:
    """The viewer's time zone; None: this machine's."""
    try:
        return ZoneInfo(st.context.timezone) if st.context.timezone else None
    except (ZoneInfoNotFoundError, ValueError):
        return None


def form(draw: Callable[[], None]) -> None:
    """Draw a part in which people type; again every so often, for buttons follow the state.

    What is being typed stays, as the browser sends it only when the field is left.
    """
    st.fragment(draw, run_every=3.0)()


def live(draw: Callable[[], None], every_seconds: float) -> None:
    """Draw a part of the page, and again every so often while live refresh is on."""
    on = st.session_state.get(_LIVE, True)
    st.fragment(draw, run_every=every_seconds if on else None)()


def pages() -> dict[str, Any]:
    """The pages of this session by path, as the navigation knows them; filled by the app."""
    found: dict[str, Any] = st.session_state.setdefault("pages", {})
    return found


def page(path: str) -> Any:
    """A page to link to."""
    return pages()[path]


def sidebar() -> None:
    """Address, key and refresh."""
    with st.sidebar:
        st.toggle(
            "Live refresh",
            value=True,
            key=_LIVE,
            help="Off: the page keeps still while you read. Its age is shown all the same.",
        )
        st.text_input(
            "API key",
            type="password",
            key=_KEY,
            placeholder="from the start" if _lent_key() else "none",
            help="Kept in this browser session only. Looking needs the scope admin:read, changes "
            "admin:write; without a keys file the daemon asks for none.",
        )
        st.html(f'<div class="memd-note">Daemon at<br>{html.escape(url())}</div>')


def header(title: str, about: str) -> None:
    """Title, one line on the page, and the strip that says whose data this is and how old."""
    st.html(f"<style>{_STYLE}{markup.STYLE}</style>")
    st.subheader(title, help=about, anchor=False)
    st.fragment(_strip, run_every=1.0)()


def _strip() -> None:
    snap = snapshot()
    st.html(f"<style>{_GREY if snap.stale else ''}</style>")
    st.html(strip(snap, zone()))


def strip(snap: Snapshot, at: tzinfo | None) -> str:
    """The line under the title, and the banner when the data is old; HTML."""
    status, state = snap.get("status"), snap.state
    colour = STATE_COLOURS.get(state, palette.NEUTRAL)
    parts = [f'<span><i class="memd-dot" style="background:{colour}"></i><b>{state}</b></span>']
    if stage := status.get("stage"):
        percent = show.share(status.get("progress"))
        parts.append(f"<span>{html.escape(str(stage))} {percent}</span>")
    parts.append(f"<span>data from <b>{show.clock(snap.answered_at, at)}</b></span>")
    if snap.revision is not None:
        parts.append(f"<span>revision <b>{snap.revision}</b></span>")
    model = status.get("model") or {}
    if model.get("name"):
        parts.append(
            f"<span>{html.escape(str(model['name']))} on {model.get('device', '?')}</span>"
        )
    if snap.scopes is not None and "admin:write" not in snap.scopes:
        parts.append("<span>read-only key</span>")
    text = f'<div class="memd-strip">{"".join(parts)}</div>'
    if not snap.stale:
        refused = snap.reading("status").problem
        return text + (f'<div class="memd-old">{html.escape(refused)}</div>' if refused else "")
    since = snap.unreachable_since or snap.answered_at or snap.now
    last = "Last values below." if snap.answered_at else "Nothing has been received yet."
    why = html.escape(snap.problem or "no answer")
    return (
        f'{text}<div class="memd-old" role="alert"><b>Unreachable since '
        f"{show.clock(since, at)}</b> · {last} Asking again every second.<br>"
        f'<span class="memd-note">{why}</span></div>'
    )


def missing(reading: Reading, what: str) -> bool:
    """Say in one line why a part of the page is empty; whether it is."""
    if reading.missing:
        note(f"{what}: this daemon does not offer it.")
    elif reading.value is None and reading.problem:
        note(f"{what}: {reading.problem}")
    elif reading.value is None:
        note(f"{what}: not received yet.")
    return reading.value is None


def table(rows: Sequence[Mapping[str, Any]], most_rows: int = 12, **more: Any) -> Any:
    """A table as high as its rows, and scrolling from `most_rows` on."""
    height = 35 * (min(len(rows), most_rows) + 1) + 3
    headings = {name: name[:1].upper() + name[1:] for name in (rows[0] if rows else ())}
    more["column_config"] = {**headings, **more.get("column_config", {})}
    return st.dataframe(rows, hide_index=True, height=height, row_height=35, **more)


def choosable(rows: Sequence[Mapping[str, Any]], parameter: str, **more: Any) -> str | None:
    """A table in which one row can be chosen; the id of that row, which the address keeps.

    The browser marks a place in the table, and rows come, go and move: so it is another table, with
    its own mark, as soon as the chosen row is elsewhere.

    Args:
        rows: Each with its `id`.
        parameter: Of the address.
        more: As for `table`.
    """
    ids = [row["id"] for row in rows]
    chosen = address.chosen(parameter)
    places = [ids.index(chosen)] if chosen in ids else []
    key = f"{parameter}-{chosen}-{places}"

    def choose() -> None:
        selected = st.session_state[key]["selection"]["rows"]
        address.choose(parameter, ids[selected[0]] if selected else None)

    table(
        rows,
        key=key,
        on_select=choose,
        selection_mode="single-row",
        selection_default={"selection": {"rows": places}},
        **more,
    )
    return chosen


def note(text: str) -> None:
    """A quiet line."""
    st.html(f'<div class="memd-note">{html.escape(text)}</div>')


def button(snap: Snapshot, label: str, key: str, help: str | None = None, **more: Any) -> bool:
    """A button that changes something; disabled with the reason when this key may not."""
    why = snap.read_only
    return st.button(label, key=key, disabled=why is not None, help=why or help, **more)


def submit(snap: Snapshot, label: str, key: str, help: str | None = None, **more: Any) -> bool:
    """The button of a form that asks or changes something; disabled as `button` is."""
    why = snap.read_only
    return st.form_submit_button(label, key=key, disabled=why is not None, help=why or help, **more)


def act(do: Callable[[Client], JSON], timeout_seconds: float = 10.0) -> JSON:
    """Call the daemon once, with this session's key.

    Raises:
        ClientError: it refused, or did not answer.
    """
    with feed().client(timeout_seconds) as client:
        return do(client)


@dataclass(frozen=True)
class _Question:
    """What `confirm` was given."""

    title: str
    what: str
    do: Callable[[Client, str, Any], JSON]
    done: Callable[[JSON], str]
    refresh: tuple[str, ...]
    options: Callable[[], Any]
    needs_reason: bool


def confirm(
    title: str,
    what: str,
    do: Callable[[Client, str, Any], JSON],
    done: Callable[[JSON], str],
    refresh: Iterable[str] = (),
    options: Callable[[], Any] = lambda: None,
    needs_reason: bool = True,
) -> None:
    """Ask for confirmation and a reason, then act and say how it went. Ends the run at hand.

    Args:
        title: Of the dialog.
        what: Will happen, in one sentence.
        do: Does it, given the reason and what `options` returned; a ClientError is shown.
        done: What to say of the answer.
        refresh: Topics to ask for again.
        options: Draws further inputs and returns what they say.
        needs_reason: Off for what changes nothing that lasts.
    """
    st.session_state[_QUESTION] = _Question(
        title, what, do, done, tuple(refresh), options, needs_reason
    )
    st.rerun()


def open_question() -> None:
    """Open the dialog that an action has asked for; the app calls it once in each run.

    Not where the action is: a dialog inside a fragment is forgotten as soon as that fragment draws
    itself again, a few seconds later, and with it every click on its buttons.
    """
    question: _Question | None = st.session_state.pop(_QUESTION, None)
    if question is not None:
        st.dialog(question.title)(_ask)(question)


def _ask(question: _Question) -> None:
    st.write(question.what)
    # The id differs by title, so no dialog shows the reason typed into another.
    name = hashlib.sha256(question.title.encode()).hexdigest()[:8]
    # A form: what was typed and the click arrive together, and Enter confirms too.
    with st.form(f"form-{name}", border=False):
        chosen, reason = question.options(), ""
        if question.needs_reason:
            reason = st.text_input(
                "Reason", key=f"reason-{name}", placeholder="Kept in the history"
            ).strip()
        confirmed = st.form_submit_button("Confirm", type="primary", key=f"confirm-{name}")
    if not confirmed:
        return
    if question.needs_reason and not reason:
        st.error("Say why: the reason is kept in the history.")
        return
    try:
        answer = act(lambda client: question.do(client, reason, chosen))
    except ClientError as error:
        st.error(error.message)
        return
    st.toast(question.done(answer), icon=":material/check:")
    feed().refresh(*question.refresh)
    st.rerun()
