"""Who holds the memory, and what each may hold."""

import streamlit as st

from memd_dashboard import frame, markup
from memd_dashboard.view import tenants

_AUTHOR = {"who": "dashboard", "source": "dashboard"}
_REFRESHED = ("tenants", "settings", "settings_history")


def draw() -> None:
    """The page."""
    frame.header(
        "Tenants",
        "Who holds the memory. A quota is soft: above it a tenant is the first to be evicted from, "
        "but room that nobody needs stays usable.",
    )
    with st.container(key="page"):
        frame.live(_table, 3.0)
        left, right = st.columns([1.65, 1], gap="medium")
        with left, st.container(border=True):
            st.markdown("**Is it fair?**", help="Share of the memory held against share of tokens")
            frame.live(_fairness, 5.0)
        with right, st.container(border=True):
            frame.form(_edit)


def _table() -> None:
    snap = frame.snapshot("tenants")
    if frame.missing(snap.reading("tenants"), "Tenants"):
        return
    rows = snap.rows("tenants", "tenants")
    if not rows:
        frame.note("No tenant is set up and none has sent a request.")
        return
    frame.table(
        tenants.table(rows),
        column_config={
            "used": st.column_config.TextColumn("Used", help="Shared pages count once"),
            "weight": st.column_config.NumberColumn("Weight", help="In the share of steps"),
            "of tokens": st.column_config.TextColumn("Of tokens", help="Of all computed"),
        },
    )


def _fairness() -> None:
    rows = frame.snapshot("tenants").rows("tenants", "tenants")
    if bars := tenants.fairness(rows):
        st.html(markup.bars(bars))
    else:
        frame.note("Nobody holds memory yet.")


def _edit() -> None:
    snap = frame.snapshot("tenants")
    st.markdown("**Quota and weight**")
    known = {row["name"]: row for row in snap.rows("tenants", "tenants") if row["name"]}
    name = st.selectbox(
        "Tenant",
        sorted(known),
        index=0 if known else None,
        accept_new_options=True,
        placeholder="Choose, or type a new one",
        help="As in its API key",
        key="edit_tenant",
    )
    if not name:
        frame.note("Choose a tenant to see and set what it may hold.")
        return
    row = known.get(name) or {}
    with st.form(f"tenant-{name}", border=False):
        quota = st.text_input(
            "Quota",
            key=f"quota-{name}",
            value=row.get("quota") or "",
            help="A size or a share: 25%",
        ).strip()
        weight = st.number_input(
            "Weight", 0.01, 1000.0, float(row.get("weight") or 1.0), key=f"weight-{name}"
        )
        save, remove = st.columns(2)
        with save:
            to_set = frame.submit(snap, "Set…", "set_tenant", type="primary", width="stretch")
        with remove:
            to_remove = row.get("configured") and frame.submit(
                snap, "Remove…", "unset_tenant", "Take quota and weight away.", width="stretch"
            )
    if to_set:
        _ask_to_set(name, quota, weight)
    elif to_remove:
        _ask_to_remove(name)


def _ask_to_set(name: str, quota: str, weight: float) -> None:
    frame.confirm(
        f"Set up {name}",
        f"Quota {quota or 'none'}, weight {weight:g}. It can be undone on the Tuning page.",
        lambda client, reason, _: client.set_tenant(
            name, reason, quota=quota or None, weight=weight, **_AUTHOR
        ),
        lambda done: f"Revision {done['revision']} is in force",
        _REFRESHED,
    )


def _ask_to_remove(name: str) -> None:
    frame.confirm(
        f"Remove {name}",
        "Quota and weight are taken away; its requests go on.",
        lambda client, reason, _: client.unset_tenant(name, reason, **_AUTHOR),
        lambda done: f"Revision {done['revision']} is in force",
        _REFRESHED,
    )
