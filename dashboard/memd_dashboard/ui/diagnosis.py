"""What is wrong, why, and the one thing to do about it."""

from collections.abc import Callable

import streamlit as st

from memd_dashboard import frame, markup, palette
from memd_dashboard.feed import Feed
from memd_dashboard.view import diagnosis
from memd_dashboard.view.facts import Finding


def draw() -> None:
    """The page."""
    frame.header(
        "Diagnosis",
        "Why is it slow, full or missing? Rules over the last ten minutes, worst first.",
    )
    with st.container(key="page"):
        frame.live(_findings, 5.0)


def _findings() -> None:
    snap = frame.snapshot(*diagnosis.TOPICS)
    if frame.missing(snap.reading("metrics"), "Metrics"):
        return
    given = diagnosis.facts(snap)
    left, right = st.columns([2, 1], gap="medium")
    with left:
        found = diagnosis.findings(given)
        if not found:
            st.success(
                "Nothing is wrong that these rules would see.", icon=":material/check_circle:"
            )
        for rank, finding in enumerate(found, 1):
            _finding(rank, finding)
    with right:
        with st.container(border=True):
            st.markdown("**What was looked at**")
            st.html(markup.fields(diagnosis.looked_at(given, snap)))
        with st.container(border=True):
            st.markdown("**For a bug report**")
            frame.note("States, settings, metrics, log and stacks; no prompts, no secrets.")
            st.download_button(
                "Download a support bundle",
                _bundle_of(frame.feed()),
                "memd-support.tar.gz",
                "application/gzip",
                key="support_bundle",
                help="The same as memd support-bundle FILE. Look into it before you send it.",
                on_click="ignore",
                disabled=snap.stale,
                width="stretch",
            )


def _bundle_of(feed: Feed) -> Callable[[], bytes]:
    """Fetches it, on a thread of Streamlit's, once the button is clicked."""

    def fetch() -> bytes:
        with feed.client(timeout_seconds=60.0) as client:
            return client.support_bundle()

    return fetch


def _finding(rank: int, finding: Finding) -> None:
    with st.container(border=True):
        colour = palette.BAD if finding.severity >= 0.7 else palette.WARNING
        st.html(
            markup.finding(
                f"{rank}. {finding.title}", colour, finding.evidence, f"→ {finding.action}"
            )
        )
        if finding.key is not None and finding.value is not None:
            query = {"key": finding.key, "value": finding.value}
            st.page_link(
                frame.page("tuning"),
                label=f"Preview {finding.key} = {finding.value}",
                icon=":material/tune:",
                query_params=query,
            )
        elif finding.page is not None:
            st.page_link(frame.page(finding.page), icon=":material/arrow_forward:")
