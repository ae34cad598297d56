"""The boards: whose memory, how warm, how busy."""

import streamlit as st

from memd_dashboard import frame, markup, show
from memd_dashboard.snapshot import JSON
from memd_dashboard.view import gpus


def draw() -> None:
    """The page."""
    frame.header("GPUs", "Whose memory a board holds, how warm and how busy it is, as NVML tells.")
    with st.container(key="page"):
        frame.live(_body, 5.0)


def _body() -> None:
    snap = frame.snapshot("gpus")
    if frame.missing(snap.reading("gpus"), "The boards"):
        return
    boards = snap.rows("gpus", "gpus")
    if not boards:
        frame.note(
            f"No GPU is seen: {snap.get('gpus').get('problem') or 'the daemon runs on the CPU'}."
        )
        model = snap.get("status").get("model") or {}
        st.html(markup.fields([("Model runs on", str(model.get("device", show.UNKNOWN)))]))
    for board in boards:
        _board(board)


def _board(board: JSON) -> None:
    with st.container(border=True):
        st.markdown(f"**{gpus.title(board)}**")
        st.html(markup.cards(gpus.cards(board)))
        st.html(markup.stacked_bar(gpus.memory(board)))
        with st.expander("Everything else that the driver tells"):
            st.html(markup.fields(gpus.details(board)))
