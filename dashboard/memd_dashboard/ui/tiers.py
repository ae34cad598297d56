"""Device, host, disk, and the copies between them."""

import streamlit as st

from memd_dashboard import frame, markup
from memd_dashboard.view import tiers

TOPICS = ("pool", "metrics")


def draw() -> None:
    """The page."""
    frame.header("Tiers", "Where pages live, and the copies between device, host and disk.")
    with st.container(key="page"):
        frame.live(_body, 5.0)


def _body() -> None:
    snap = frame.snapshot(*TOPICS)
    if frame.missing(snap.reading("pool"), "The tiers"):
        return
    pool, window = snap.get("pool"), snap.window(300)
    st.html(markup.cards(tiers.cards(pool, window)))
    left, right = st.columns(2, gap="medium")
    with left, st.container(border=True):
        st.markdown("**Evicted pages by reason**", help="In the last five minutes")
        rows = tiers.evictions(window)
        if any(row.value for row in rows):
            st.html(markup.bars(rows))
        else:
            frame.note("Nothing was evicted in the last five minutes.")
    with right, st.container(border=True):
        st.markdown("**Pages fetched ahead**", help="Since the start, by how it ended")
        rows = tiers.prefetched(pool)
        if any(row.value for row in rows):
            st.html(markup.bars(rows))
        else:
            frame.note("Nothing has been fetched ahead yet.")
    with st.container(border=True):
        st.markdown("**Copies**")
        if not pool.get("host_capacity_pages"):
            frame.note("There is no host tier: memory.host.limit is 0, so evicted pages are lost.")
        rows = tiers.flows(window)
        if any(row.value for row in rows):
            st.html(markup.bars(rows))
        frame.table(tiers.copies(pool, window))
    rows = tiers.disk_losses(pool)
    if rows:
        with st.container(border=True):
            st.markdown("**Disk: what was not written or was of no use**", help="Since the start")
            st.html(markup.bars(rows))
