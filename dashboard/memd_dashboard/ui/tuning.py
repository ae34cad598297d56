"""Live settings: see, preview, apply, undo."""

from typing import Any

import streamlit as st

from memd.client import ClientError
from memd_dashboard import frame, show
from memd_dashboard.snapshot import Snapshot
from memd_dashboard.view import tuning

TOPICS = ("settings", "settings_history", "pool")
_AUTHOR = {"who": "dashboard", "source": "dashboard"}
_COLUMNS = {
    "setting": st.column_config.TextColumn("Setting", width=235),
    "value": st.column_config.TextColumn("In force", width=110),
    "default": st.column_config.TextColumn("Default", width=110),
    "allowed": st.column_config.TextColumn("Allowed", width=165),
    "source": st.column_config.TextColumn("Source", help="Where the value comes from", width=150),
    "meaning": st.column_config.TextColumn("Meaning", width="large"),
}

_BESIDE = (
    "{}: in the five minutes before the change, and in the five after it. A dash: without traffic, "
    "or not over yet."
)
_AUDIT_COLUMNS = {
    "revision": st.column_config.NumberColumn("Revision", width=70),
    "who": st.column_config.TextColumn("Who", width=90),
    "kind": st.column_config.TextColumn("Kind", width=80),
    "change": st.column_config.TextColumn("Change", width=250),
    "reason": st.column_config.TextColumn("Reason", width=170),
    "first token": st.column_config.TextColumn(
        "First token p95",
        help=_BESIDE.format("Time to the first token, 95th percentile"),
        width=120,
    ),
    "between tokens": st.column_config.TextColumn(
        "Between tokens p95", help=_BESIDE.format("Gap between tokens, 95th percentile"), width=120
    ),
    "occupied": st.column_config.TextColumn(
        "Occupied", help=_BESIDE.format("Share of pages not free, on average"), width=110
    ),
    "direct reclaim": st.column_config.TextColumn(
        "Direct reclaim",
        help=_BESIDE.format("Share of evictions for which a request waited"),
        width=110,
    ),
    "through": st.column_config.TextColumn("Through", width=80),
    "now": st.column_config.TextColumn("Now", help="What has become of it", width=80),
}


def draw() -> None:
    """The page."""
    frame.header("Tuning", "Settings that can be changed while the daemon runs, and taken back.")
    with st.container(key="page"):
        frame.live(_pending, 2.0)
        left, right = st.columns([2.1, 1], gap="medium")
        with left:
            frame.live(_settings, 5.0)
        with right, st.container(border=True):
            frame.form(_edit)
        frame.live(_history, 5.0)
        frame.live(_file, 10.0)


def _pending() -> None:
    snap = frame.snapshot(*TOPICS)
    waiting = tuning.pending(snap.get("settings"))
    if waiting is None:
        return
    revision, when = waiting
    text, keep = st.columns([5, 1])
    text.warning(f"Revision {revision} reverts by itself {when}, unless you keep it.")
    with keep:
        if frame.button(
            snap, "Keep it", "keep", "Confirm the change.", type="primary", width="stretch"
        ):
            _run(
                lambda: frame.act(lambda client: client.confirm_settings(revision, **_AUTHOR)),
                "Kept",
            )


def _run(do: Any, said: str) -> None:
    try:
        do()
    except ClientError as error:
        st.error(error.message)
    else:
        st.toast(said, icon=":material/check:")
        frame.feed().refresh(*TOPICS)
        st.rerun(scope="fragment")


def _settings() -> None:
    snap = frame.snapshot(*TOPICS)
    if frame.missing(snap.reading("settings"), "The settings"):
        return
    rows = tuning.rows(snap.get("settings"), snap.now)
    frame.table(
        rows,
        column_config=_COLUMNS,
        column_order=list(_COLUMNS),
        most_rows=20,
    )


def _edit() -> None:
    snap = frame.snapshot(*TOPICS)
    st.markdown("**Change a setting**")
    live = tuning.live(snap.get("settings"))
    if not live:
        frame.note("The settings have not been received yet.")
        return
    keys = tuning.editable(snap.get("settings"))
    wanted = st.query_params.get("key", keys[0])
    key = st.selectbox("Setting", keys, index=keys.index(wanted) if wanted in keys else 0)
    entry = live[key]
    st.caption(entry.get("description") or "", help=tuning.allowed(entry) or None)
    proposed = st.query_params.get("value") if key == st.query_params.get("key") else None
    with st.form(f"edit-{key}", border=False):
        text = st.text_input(
            f"New value, now {show.setting(entry.get('value'), entry.get('unit'))}",
            value=proposed or tuning.typed(entry),
            key=f"new-{key}",
            help=f"Default: {show.setting(entry.get('default'), entry.get('unit'))}. Shares like "
            "85%, sizes like 8GB, durations like 30s.",
        )
        asked = frame.submit(snap, "Preview", "preview", "See what it would do; changes nothing.")
    changes = {key: tuning.parse(text)}
    if asked:
        try:
            answer = frame.act(lambda client: client.preview_settings(changes))
        except ClientError as error:
            answer = {"valid": False, "problems": {error.param or key: error.message}}
        st.session_state["previewed"] = changes, snap.revision, answer
    _preview(snap, changes)


def _preview(snap: Snapshot, changes: dict[str, Any]) -> None:
    seen, revision, answer = st.session_state.get("previewed", (None, None, {}))
    if seen != changes:
        return
    if not answer.get("valid"):
        st.error("\n\n".join(tuning.problems(answer)))
        return
    page_bytes = (snap.get("pool").get("layout") or {}).get("page_bytes", 0)
    units = tuning.units(snap.get("settings"))
    st.info("\n\n".join(tuning.effect(answer, page_bytes, units)))
    if revision != snap.revision:
        st.warning("The settings have changed since this preview: look again.")
    elif answer.get("changes"):
        back = st.segmented_control(
            "Revert by itself",
            list(tuning.REVERTS),
            default="no",
            help="Unless you keep the change until then, the former value comes back.",
        )
        persist = st.checkbox(
            "Keep over a restart",
            help="Otherwise the next start reads file, environment and flags.",
        )
        # What is typed stays in the browser until it is previewed: this may be about another value.
        label = f"Apply {tuning.new_values(answer['changes'], units)}…"
        if frame.button(snap, label, "apply", type="primary"):
            more = {"persist": persist, "revert_after_seconds": tuning.REVERTS[back or "no"]}
            frame.confirm(
                "Apply the change",
                tuning.differences(answer["changes"], units),
                lambda client, reason, _: client.change_settings(
                    revision, reason, changes, **more, **_AUTHOR
                ),
                lambda done: f"Revision {done['revision']} is in force",
                TOPICS,
            )


def _history() -> None:
    snap = frame.snapshot(*TOPICS)
    if frame.missing(snap.reading("settings_history"), "The history"):
        return
    history, units = snap.rows("settings_history", "history"), tuning.units(snap.get("settings"))
    with st.container(border=True):
        title, which, undo = st.columns([3, 2, 1], vertical_alignment="bottom")
        title.markdown("**What was changed**")
        choices = tuning.undoable(history)
        if choices:
            labels = {
                row["revision"]: f"{row['revision']}: {tuning.differences(row['changes'], units)}"
                for row in choices
            }
            number = which.selectbox(
                "Revision to undo",
                list(labels),
                format_func=lambda each: labels[each],
                label_visibility="collapsed",
                key="undo_revision",
            )
            with undo:
                if frame.button(snap, "Undo…", "undo", "Put the old values back.", width="stretch"):
                    frame.confirm(
                        f"Undo revision {number}",
                        f"The old values come back: {labels[number]}",
                        lambda client, reason, _: client.undo_settings(
                            reason, revision=number, **_AUTHOR
                        ),
                        lambda done: f"Undone: revision {done['revision']} is in force",
                        TOPICS,
                    )
        frame.table(
            tuning.audit(history, frame.zone(), units), most_rows=7, column_config=_AUDIT_COLUMNS
        )


def _file() -> None:
    """What is in force as a file, and what the sources say otherwise."""
    snap = frame.snapshot("settings", "settings_file", "settings_diff")
    if frame.missing(snap.reading("settings_file"), "The settings as a file"):
        return
    text = str(snap.get("settings_file").get("text", ""))
    rows = tuning.beside_sources(snap.get("settings_diff"), tuning.units(snap.get("settings")))
    with st.container(border=True):
        title, download = st.columns([4, 1], vertical_alignment="bottom")
        title.markdown("**In force, beside file, environment and flags**")
        download.download_button(
            "Download as YAML",
            text,
            "memd.yaml",
            "application/yaml",
            help="A file that `memd serve --config` takes; without secrets.",
            key="settings_file",
            width="stretch",
        )
        if rows:
            frame.table(rows, most_rows=7)
        else:
            frame.note("Nothing differs: a restart would change nothing.")
