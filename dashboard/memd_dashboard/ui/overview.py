"""What fills the memory, whether requests wait, what is firing, what changed."""

import streamlit as st

from memd_dashboard import frame, markup, show
from memd_dashboard.snapshot import HISTORY_METRICS, Snapshot
from memd_dashboard.view import alerts, overview

TOPICS = (
    "pool",
    "requests",
    "metrics",
    "settings",
    "settings_history",
    "events",
    "alerts",
    *HISTORY_METRICS,
)


def draw() -> None:
    """The page."""
    frame.header("Overview", "What fills the memory, whether requests wait, what changed lately.")
    with st.container(key="page"):
        frame.live(_numbers, 5.0)
        frame.live(_pool, 2.0)
        frame.live(_below, 5.0)


def _numbers() -> None:
    snap = frame.snapshot(*TOPICS)
    st.html(markup.cards(overview.numbers(snap)))


def _pool() -> None:
    snap = frame.snapshot(*TOPICS)
    with st.container(border=True):
        left, right = st.columns([3, 1.15], gap="large")
        with left:
            st.markdown("**What fills the memory**")
            if not frame.missing(snap.reading("pool"), "The pool"):
                st.html(overview.pool_bar(snap.get("pool")))
        with right:
            st.markdown("**Requests**")
            for column, state in zip(st.columns(2), ("running", "waiting"), strict=True):
                column.metric(state.capitalize(), show.count(overview.open_requests(snap, state)))
            for reason, number, words in overview.waiting(snap):
                st.caption(f"{number} wait {words}", help=f"memd calls it {reason}")


def _below() -> None:
    snap = frame.snapshot(*TOPICS)
    left, right = st.columns(2, gap="medium")
    with left, st.container(border=True):
        st.markdown("**Alerts**")
        _alerts(snap)
    with right, st.container(border=True):
        st.markdown("**What changed in the last 24 hours**")
        rows = overview.changes(snap)
        if rows:
            st.html(markup.timeline((show.ago(row.at, snap.now), row.text) for row in rows))
        else:
            frame.note("No setting was changed and nothing was restarted.")


def _alerts(snap: Snapshot) -> None:
    if frame.missing(snap.reading("alerts"), "Alerts"):
        return
    firing = alerts.firing(snap.rows("alerts", "alerts"))
    if not firing:
        st.success("Nothing fires.", icon=":material/check_circle:")
        return
    for row in firing[:5]:
        st.html(alerts.line(row, snap.now))
    st.page_link(frame.page("alerts"), label="All alerts", icon=":material/notifications:")
