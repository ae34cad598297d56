"""What is cached, who shares it, and why prompts miss."""

import streamlit as st

from memd.client import ClientError
from memd_dashboard import frame, markup, show
from memd_dashboard.snapshot import MISSES_METRIC
from memd_dashboard.view import prefixes

# Each part asks for its own only: the first waits for no answer that another needs.
TOPICS = ("prefixes",)
_NOTHING = (None, "", show.UNKNOWN)
PINS = {"10 minutes": 600, "1 hour": 3600, "1 day": 86400, "until unpinned": None}


def draw() -> None:
    """The page."""
    frame.header(
        "Prefix tree",
        "Beginnings of prompts whose keys and values are kept, so that the next prompt that begins "
        "the same need not compute them again.",
    )
    with st.container(key="page"):
        frame.live(_tree, 5.0)
        left, right = st.columns(2, gap="medium")
        with left, st.container(border=True):
            frame.live(_misses, 5.0)
        with right, st.container(border=True):
            frame.form(_explain)
        with st.container(border=True):
            frame.live(_missed_requests, 10.0)


def _tree() -> None:
    snap = frame.snapshot(*TOPICS)
    if frame.missing(snap.reading("prefixes"), "The prefixes"):
        return
    rows = snap.rows("prefixes", "prefixes")
    if not rows:
        frame.note("Nothing is cached yet.")
        return
    with st.container(border=True):
        st.markdown("**Shared beginnings and their branches**")
        st.altair_chart(prefixes.icicle(rows), width="stretch")
    shown = prefixes.table(rows, snap.now)
    known = [name for name in shown[0] if any(row[name] not in _NOTHING for row in shown)]
    chosen = frame.choosable(shown, "prefix", column_order=known, most_rows=8)
    if not chosen:
        frame.note("Select a row to pin a prefix, so that it is not evicted.")
        return
    row = next((row for row in rows if row.get("id") == chosen), {})
    text, pin, unpin = st.columns([4, 1, 1], vertical_alignment="center")
    text.markdown(f"**{chosen}** · {show.count(row.get('tokens'))} tokens")
    with pin:
        if frame.button(snap, "Pin…", "pin", "Keep it in memory.", width="stretch"):
            frame.confirm(
                f"Pin {chosen}",
                "Its pages are not evicted until the pin ends. Pins share a budget.",
                lambda client, reason, seconds: client.pin(
                    chosen, seconds, reason, who="dashboard"
                ),
                lambda answer: "Pinned",
                TOPICS,
                _pin_time,
            )
    with unpin:
        if frame.button(snap, "Unpin", "unpin", "Let it be evicted again.", width="stretch"):
            frame.confirm(
                f"Unpin {chosen}",
                "Its pages may be evicted again.",
                lambda client, reason, _: client.unpin(chosen, reason, who="dashboard"),
                lambda answer: "Unpinned",
                TOPICS,
            )


def _pin_time() -> int | None:
    return PINS[st.segmented_control("For", list(PINS), default="1 hour", required=True)]


def _misses() -> None:
    snap = frame.snapshot("metrics", MISSES_METRIC)
    st.markdown("**Why prompt tokens had to be computed**")
    rows = prefixes.misses(snap.window(300))
    if any(row.value for row in rows):
        st.caption("Tokens of the last five minutes, by reason")
        st.html(markup.bars(rows))
    else:
        frame.note("No prompt has missed in the last five minutes.")
    history = prefixes.miss_history(snap.get(MISSES_METRIC), frame.zone())
    if history:
        st.caption("The last hour")
        st.altair_chart(prefixes.miss_chart(history), width="stretch")


def _missed_requests() -> None:
    snap = frame.snapshot("finished")
    st.markdown("**Requests that missed most**")
    if frame.missing(snap.reading("finished"), "The history of requests"):
        return
    rows = prefixes.missed_requests(snap.rows("finished", "requests"), frame.zone())
    if rows:
        frame.table(rows, most_rows=6)
    else:
        frame.note("Of the last 500 requests none has missed.")


def _explain() -> None:
    st.markdown("**What would hit now?**")
    with st.form("explain_form", border=False):
        text = st.text_area("Prompt", placeholder="Paste a prompt", height=90, key="explain_text")
        asked = frame.submit(frame.snapshot(), "Explain", "explain", "The text is not kept.")
    if asked and text:
        try:
            answer = frame.act(lambda client: client.explain_prefix(text))
        except ClientError as error:
            st.error(error.message)
            return
        st.session_state["explained"] = prefixes.explained(answer)
    if rows := st.session_state.get("explained"):
        st.html(markup.fields(rows))
