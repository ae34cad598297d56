"""The open requests, one of them in detail, and the finished ones."""

from typing import Any

import streamlit as st

from memd_dashboard import address, frame, markup, show
from memd_dashboard.snapshot import JSON, Snapshot
from memd_dashboard.view import requests
from memd_dashboard.view.prefixes import MISS_REASONS

TOPICS = ("requests", "pool")
_COLUMNS = {
    "id": st.column_config.TextColumn("Request", width="medium"),
    "tenant": st.column_config.TextColumn("Tenant", width="small"),
    "state": st.column_config.TextColumn("State", help="For waiting ones, what they wait for"),
    "priority": st.column_config.NumberColumn("Prio.", help="Lower goes first", width="small"),
    "prompt": st.column_config.NumberColumn("Prompt", help="Tokens", format="localized"),
    "cached": st.column_config.NumberColumn(
        "Cached", help="Prompt tokens whose KV was already there", format="localized"
    ),
    "generated": st.column_config.NumberColumn("Output", help="Tokens so far", format="localized"),
    "pages": st.column_config.NumberColumn(
        "Pages", help="Pages of the pool it holds", width="small"
    ),
    "queued": st.column_config.TextColumn(
        "Queued", help="Time before its first step", width="small"
    ),
    "speed": st.column_config.NumberColumn("tok/s", help="Output tokens a second", width="small"),
    "preempted": st.column_config.NumberColumn(
        "Preempted", help="Times it had to give its memory away", width="small"
    ),
    "age": st.column_config.TextColumn("Age", width="small"),
}


def draw() -> None:
    """The page."""
    frame.header(
        "Requests", "What is running and waiting now, and what has finished. No prompt text."
    )
    with st.container(key="page"):
        live, finished = st.tabs(["Open", "Finished"])
        with live:
            frame.live(_open, 2.0)
        with finished:
            frame.live(_finished, 10.0)


def _open() -> None:
    snap = frame.snapshot(*TOPICS)
    if frame.missing(snap.reading("requests"), "The open requests"):
        return
    text, states = _filters()
    every = snap.rows("requests", "requests")
    rows = requests.table(requests.filtered(every, text, states))
    if not rows:
        frame.note("No open request." if not every else "No open request matches the filter.")
    else:
        frame.choosable(rows, "request", column_config=_COLUMNS)
    if chosen := address.chosen("request"):
        row = next((row for row in every if row["id"] == chosen), None)
        _card(snap, chosen, row)
    elif rows:
        frame.note("Select a row to see the request in detail, cancel, preempt or reorder it.")


def _filters() -> tuple[str, list[str]]:
    left, right = st.columns([1, 1])
    text = left.text_input(
        "Filter by request or tenant",
        value=st.query_params.get("find", ""),
        placeholder="any",
        key="request_find",
    )
    known = ["running", "waiting"]
    given = [each for each in st.query_params.get("states", "").split(",") if each in known]
    states = right.pills(
        "State", known, selection_mode="multi", default=given, key="request_states"
    )
    st.query_params["find"] = text
    st.query_params["states"] = ",".join(states)
    return text, list(states)


def _card(snap: Snapshot, name: str, row: JSON | None) -> None:
    with st.container(border=True):
        title, close = st.columns([8, 1])
        title.markdown(f"**{name}**")
        if close.button("Close", key="close_request", width="stretch"):
            address.choose("request", None)
            st.rerun(scope="fragment")
        if row is None:
            frame.note("It is no longer open: look under Finished.")
            return
        left, right = st.columns([1, 1.3], gap="large")
        page_bytes = (snap.get("pool").get("layout") or {}).get("page_bytes", 0)
        left.html(markup.fields(requests.card(row, page_bytes)))
        with right:
            if spans := requests.phases(row):
                st.altair_chart(requests.gantt(spans), width="stretch")
            _actions(snap, name)


def _actions(snap: Snapshot, name: str) -> None:
    cancel, preempt, order = st.columns([1, 1, 1])
    with cancel:
        if frame.button(snap, "Cancel", "cancel", "End it for its client.", width="stretch"):
            frame.confirm(
                f"Cancel {name}",
                "The client gets what was generated so far and an error; the pages stay cached.",
                lambda client, reason, _: client.cancel(name, reason),
                lambda answer: f"{answer['cancelled']} sequence cancelled",
                ("requests", "pool"),
            )
    with preempt:
        if frame.button(
            snap, "Preempt", "preempt", "Take its memory; it waits and resumes.", width="stretch"
        ):
            frame.confirm(
                f"Preempt {name}",
                "Its pages become cached, and it goes back to the queue; it resumes by itself.",
                lambda client, reason, _: client.preempt(name, reason),
                lambda answer: "Preempted",
                ("requests", "pool"),
            )
    with order:
        if frame.button(
            snap, "Priority…", "priority", "Lower goes first; 0 is usual.", width="stretch"
        ):
            frame.confirm(
                f"Priority of {name}",
                "Waiting requests start in this order; of running ones the last gives way first.",
                lambda client, reason, value: client.set_priority(name, int(value), reason),
                lambda answer: f"Priority {answer['priority']}",
                ("requests",),
                lambda: st.number_input("Priority", value=0, step=1, key="new_priority"),
            )


def _finished() -> None:
    snap = frame.snapshot("finished")
    if frame.missing(snap.reading("finished"), "The history of requests"):
        return
    rows = snap.rows("finished", "requests")
    if not rows:
        frame.note("Nothing has finished yet.")
        return
    by = st.segmented_control(
        "Grouped by",
        ["tenant", "outcome", "model", "endpoint"],
        default="tenant",
        key="finished_by",
    )
    frame.table(requests.percentiles(rows, by or "tenant"))
    frame.table([_finished_row(row) for row in rows])


def _finished_row(row: JSON) -> dict[str, Any]:
    zone = frame.zone()
    return {
        "finished": show.date(row.get("time"), zone),
        "request": row.get("request_id"),
        "tenant": row.get("tenant") or "",
        "outcome": row.get("outcome"),
        "reason": row.get("finish_reason"),
        "prompt": row.get("prompt_tokens"),
        "cached": requests.cached_tokens(row),
        "missed": row.get("missed_tokens"),
        "why missed": MISS_REASONS.get(str(row.get("miss_reason")), ""),
        "output": row.get("generated_tokens"),
        "first token": show.duration(row.get("time_to_first_token_seconds")),
        "queued": show.duration(row.get("queue_seconds")),
        "duration": show.duration(row.get("duration_seconds")),
        "peak pages": row.get("peak_pages"),
    }
