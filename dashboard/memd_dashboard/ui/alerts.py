"""What fires, what is about to, what is silenced, and who is told."""

import html

import streamlit as st

from memd.client import ClientError
from memd_dashboard import frame, markup
from memd_dashboard.snapshot import JSON, Snapshot
from memd_dashboard.view import alert_trials, alerts

TOPICS = ("alerts", "silences", "incidents", "channels", "alert_rules")


def draw() -> None:
    """The page."""
    frame.header("Alerts", "What fires, what is about to fire, what is silenced, and who is told.")
    with st.container(key="page"):
        now, history, rules, channels = st.tabs(["Now", "History", "Rules", "Channels"])
        with now:
            frame.live(_now, 3.0)
        with history:
            frame.live(_history, 10.0)
        with rules:
            frame.live(_rules, 30.0)
            with st.container(border=True):
                st.fragment(_try)()
        with channels:
            frame.live(_channels, 10.0)


def _now() -> None:
    snap = frame.snapshot("alerts", "silences")
    if frame.missing(snap.reading("alerts"), "Alerts"):
        return
    rows = alerts.ordered(snap.rows("alerts", "alerts"))
    if not any(row.get("state") in ("firing", "pending") for row in rows):
        st.success("Nothing fires and nothing is pending.", icon=":material/check_circle:")
    for number, row in enumerate(rows):
        _alert(snap, number, row)
    silences = snap.rows("silences", "silences")
    if silences:
        with st.container(border=True):
            st.markdown("**Silences**")
            for row in silences:
                _silence(snap, row)


def _alert(snap: Snapshot, number: int, row: JSON) -> None:
    with st.container(border=True):
        text, action = st.columns([6, 1], vertical_alignment="center")
        text.html(alerts.line(row, snap.now))
        if row.get("state") in ("firing", "pending") and not row.get("silenced"):
            with action:
                if frame.button(
                    snap,
                    "Silence…",
                    f"silence-{number}",
                    "Tell nobody for a while.",
                    width="stretch",
                ):
                    _ask_silence(row)


def _ask_silence(row: JSON) -> None:
    def options() -> int:
        name = st.segmented_control("For", list(alerts.DURATIONS), default="2 hours", required=True)
        return alerts.DURATIONS[name]

    frame.confirm(
        f"Silence {row.get('name')}",
        "It is evaluated and shown as before, but nobody is told until the silence ends.",
        lambda client, reason, seconds: client.silence(
            alerts.matchers(row), seconds, reason, "dashboard"
        ),
        lambda answer: "Silenced",
        TOPICS,
        options,
    )


def _silence(snap: Snapshot, row: JSON) -> None:
    shown = alerts.silences([row], frame.zone())[0]
    text, action = st.columns([6, 1], vertical_alignment="center")
    text.html(
        f"<div><b>{html.escape(shown['matches'])}</b> until {shown['ends']}</div>"
        f'<div class="memd-note">{html.escape(str(shown["author"]))}: '
        f"{html.escape(str(shown['reason']))}</div>"
    )
    with action:
        if frame.button(snap, "End", f"end-{row.get('id')}", "Tell people again.", width="stretch"):
            frame.confirm(
                f"End silence {row.get('id')}",
                f"People are told again about {shown['matches']}.",
                lambda client, reason, _: client.unsilence(row["id"]),
                lambda answer: "Ended",
                TOPICS,
                needs_reason=False,
            )


def _history() -> None:
    snap = frame.snapshot("incidents")
    if frame.missing(snap.reading("incidents"), "The history of alerts"):
        return
    rows = alerts.incidents(snap.rows("incidents", "incidents"), frame.zone(), snap.now)
    if rows:
        frame.table(rows)
    else:
        frame.note("No alert has fired yet.")


def _rules() -> None:
    snap = frame.snapshot("alert_rules")
    if not frame.missing(snap.reading("alert_rules"), "The rules"):
        frame.table(alerts.rules(snap.rows("alert_rules", "rules")), most_rows=16)


def _try() -> None:
    snap = frame.snapshot("alert_rules")
    st.markdown(
        "**Would it have fired?**",
        help="The rule is run over the samples that were kept, as it is and as you change it. "
        "Nothing is changed.",
    )
    known = {row["name"]: row for row in alert_trials.triable(snap.rows("alert_rules", "rules"))}
    if not known:
        frame.note("The rules have not been received yet.")
        return
    name = st.selectbox("Rule", list(known), key="tried_rule")
    with st.form(f"try-{name}", border=False):
        limit, hold, days, go = st.columns([1, 1, 1, 1], vertical_alignment="bottom")
        threshold = limit.text_input(
            "Limit", placeholder="as it is", help="A number; shares also as 5%", key=f"limit-{name}"
        )
        seconds = hold.number_input(
            "Must hold, in seconds", 0, 86_400, known[name]["for_seconds"], key=f"hold-{name}"
        )
        back = days.selectbox("Over the last", list(alert_trials.BACK), index=2, key=f"back-{name}")
        with go:
            asked = st.form_submit_button("Try", key=f"go-{name}", width="stretch")
    if asked:
        st.session_state["trial"] = _trial(name, threshold, int(seconds), snap.now, back)
    answer = st.session_state.get("trial")
    if isinstance(answer, str):
        st.error(answer)
    elif answer and answer["rule"] == name:
        st.html(markup.cards(alert_trials.cards(answer)))
        if any(answer[form]["firings"] for form in alert_trials.FORMS):
            st.altair_chart(alert_trials.firings(answer, frame.zone()), width="stretch")
        st.caption(alert_trials.coverage(answer))


def _trial(name: str, threshold: str, seconds: int, now: float, back: str) -> JSON | str:
    """The answer, or why there is none."""
    try:
        limit = alert_trials.limit(threshold)
        since = now - alert_trials.BACK[back]
        with st.spinner("Some seconds: every sample of these days is looked at"):
            return frame.act(
                lambda client: client.try_rule(name, limit, seconds, since), timeout_seconds=120.0
            )
    except (ValueError, ClientError) as error:
        return str(error)


def _channels() -> None:
    snap = frame.snapshot("channels")
    if frame.missing(snap.reading("channels"), "Channels"):
        return
    rows = snap.rows("channels", "channels")
    if not rows:
        frame.note("Nobody is told: no channel is configured (alerts.channels).")
        return
    frame.table(alerts.channels(rows, snap.now))
    for row in rows:
        name = str(row.get("name"))
        if frame.button(snap, f"Test {name}", f"test-{name}", "Send a test notification."):
            _ask_test(name)


def _ask_test(name: str) -> None:
    def done(answer: JSON) -> str:
        return "Delivered" if answer.get("delivered") else f"Failed: {answer.get('error')}"

    frame.confirm(
        f"Test {name}",
        f"A test notification is sent to {name}.",
        lambda client, reason, _: client.test_channel(name),
        done,
        ("channels",),
        needs_reason=False,
    )
