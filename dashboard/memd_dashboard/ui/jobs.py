"""Scheduled jobs, what happened, and the database behind the charts."""

import streamlit as st

from memd_dashboard import frame, markup
from memd_dashboard.view import jobs


def draw() -> None:
    """The page."""
    frame.header("Jobs and history", "What runs on a schedule, what happened, what is kept of it.")
    with st.container(key="page"):
        frame.live(_database, 10.0)
        frame.live(_jobs, 5.0)
        frame.live(_events, 5.0)


def _database() -> None:
    snap = frame.snapshot("metrics")
    st.html(markup.cards(jobs.database(snap.window())))


def _jobs() -> None:
    snap = frame.snapshot("jobs")
    if frame.missing(snap.reading("jobs"), "Jobs"):
        return
    rows = snap.rows("jobs", "jobs")
    with st.container(border=True):
        title, which, run = st.columns([3, 2, 1], vertical_alignment="bottom")
        title.markdown("**Jobs**")
        names = [str(row["name"]) for row in rows]
        if names:
            name = which.selectbox("Job", names, label_visibility="collapsed", key="job")
            with run:
                if frame.button(
                    snap, "Run now", "run_job", "Besides its schedule.", width="stretch"
                ):
                    frame.confirm(
                        f"Run {name} now",
                        "It runs once, besides its schedule; never twice at once.",
                        lambda client, reason, _: client.run_job(name),
                        lambda answer: f"{name} started",
                        ("jobs",),
                        needs_reason=False,
                    )
        frame.table(jobs.table(rows, snap.now))


def _events() -> None:
    snap = frame.snapshot("events")
    if frame.missing(snap.reading("events"), "Events"):
        return
    rows = snap.rows("events", "events")
    with st.container(border=True):
        st.markdown("**Events**")
        if not rows:
            frame.note("Nothing has happened yet.")
            return
        known = sorted({str(row.get("kind")) for row in rows})
        given = [kind for kind in st.query_params.get("kinds", "").split(",") if kind in known]
        kinds = st.pills("Kinds", known, selection_mode="multi", default=given, key="event_kinds")
        st.query_params["kinds"] = ",".join(kinds)
        frame.table(jobs.events(rows, frame.zone(), kinds))
