"""Who is told what: once, together, not too often, and not while silenced."""

from memd_alerts.notify import Policy, delivered, plan
from memd_alerts.state import Alert, Silence, State
from msgspec.structs import replace

NOW = 1_000_000.0
BOOKS = "docs/runbooks"


def alert(rule="MemdHot", gpu="0", state="firing", severity="page", **more):
    labels = {"alertname": rule, "severity": severity, "instance": "a:1", "gpu": gpu}
    times = {"fired_at": NOW, "resolved_at": NOW + 60 if state == "resolved" else None}
    if state == "pending":
        times = {}
    return Alert(
        f"{rule}{gpu}", rule, labels, state, "hot", 2.0, 1.0, 2.0, NOW, NOW, **times, **more
    )


def state(*alerts, **more):
    return State(alerts=list(alerts), **more)


def send(state, policy=Policy(), now=NOW, error=None, channel="team"):  # noqa: B008
    """Plan and carry out. Returns the titles and the state after."""
    due = plan(state, channel, policy, now, BOOKS)
    for message in due.messages:
        state = delivered(state, message, now, error)
    return [message.title for message in due.messages], state


def test_an_alert_is_told_once_when_it_fires_and_once_when_it_ends():
    titles, after = send(state(alert()))
    assert titles == ["[FIRING] MemdHot on a:1"]
    assert send(after, now=NOW + 15)[0] == []
    ended = replace(
        after, alerts=[replace(after.alerts[0], state="resolved", resolved_at=NOW + 90)]
    )
    titles, after = send(ended, now=NOW + 90)
    assert titles == ["[RESOLVED] MemdHot on a:1"]
    assert send(after, now=NOW + 105)[0] == []


def test_what_is_pending_or_was_never_told_is_not_told():
    assert send(state(alert(state="pending")))[0] == []
    assert send(state(alert(state="resolved")))[0] == []


def test_an_alert_that_fires_again_before_its_end_was_told_is_not_told_again():
    _, after = send(state(alert()))
    again = replace(after.alerts[0], id="new", state="pending")
    assert send(state(replace(again, state="firing")))[0] == []
    assert send(state(again), now=NOW + 60)[0] == ["[RESOLVED] MemdHot on a:1"]


def test_alerts_of_one_rule_share_a_message():
    titles, _ = send(state(alert(gpu="0"), alert(gpu="1"), alert("MemdCold")))
    assert titles == ["[FIRING] MemdHot (2) on a:1", "[FIRING] MemdCold on a:1"]


def test_the_body_says_what_where_and_what_to_do():
    (message,) = plan(state(alert()), "team", Policy(), NOW, BOOKS).messages
    assert message.body == (
        "page: hot\nalertname=MemdHot, gpu=0, instance=a:1, severity=page\ndocs/runbooks/MemdHot.md"
    )
    ended = alert(state="resolved", told={"team": "firing"})
    (message,) = plan(state(ended), "team", Policy(), NOW, BOOKS).messages
    assert "resolved after 1.0 min" in message.body
    lost = replace(ended, lost=True)
    (message,) = plan(state(lost), "team", Policy(), NOW, BOOKS).messages
    assert "no data for an hour" in message.body


def test_a_channel_hears_of_its_severities_only():
    tickets = Policy(severities=frozenset({"ticket"}))
    assert send(state(alert()), tickets)[0] == []
    assert send(state(alert(severity="ticket")), tickets)[0]


def test_a_channel_may_do_without_the_end():
    ended = alert(state="resolved", told={"team": "firing"})
    assert send(state(ended), Policy(send_resolved=False))[0] == []


def silence(ends_at=NOW + 600, **matchers):
    return Silence("s1", matchers, NOW - 1, ends_at, "why", "who")


def test_a_silenced_alert_is_told_when_the_silence_ends():
    quiet = state(alert(), silences=[silence(alertname="Memd*", gpu="0")])
    due = plan(quiet, "team", Policy(), NOW, BOOKS)
    assert due.messages == ()
    assert [each.rule for each in due.held] == ["MemdHot"]
    assert send(quiet, now=NOW + 600)[0] == ["[FIRING] MemdHot on a:1"]


def test_the_end_of_an_alert_is_told_in_spite_of_a_silence():
    ended = alert(state="resolved", told={"team": "firing"})
    quiet = state(ended, silences=[silence(alertname="MemdHot")])
    assert send(quiet)[0] == ["[RESOLVED] MemdHot on a:1"]


def test_all_matchers_of_a_silence_must_match():
    for matchers in (
        {"gpu": "1"},
        {"alertname": "MemdHot", "model": "*"},
        {"alertname": "memdhot"},
    ):
        assert send(state(alert(), silences=[silence(**matchers)]))[0], matchers


def test_beyond_the_limit_everything_shares_one_message_later():
    alerts = [alert(f"Memd{name}") for name in "ABCDEFGH"]
    two = Policy(per_minute=2)
    titles, after = send(state(*alerts), two)
    assert len(titles) == 1
    assert titles[0].startswith("[FIRING] MemdA, MemdB")
    more = replace(after, alerts=[*after.alerts, alert("MemdX"), alert("MemdY")])
    titles, after = send(more, two, now=NOW + 15)
    assert titles == ["[FIRING] MemdX, MemdY (2) on a:1"]
    late = replace(after, alerts=[*after.alerts, alert("MemdZ")])
    due = plan(late, "team", two, NOW + 30, BOOKS)
    assert due.messages == ()
    assert [each.rule for each in due.held] == ["MemdZ"]
    assert send(late, two, now=NOW + 61)[0] == ["[FIRING] MemdZ on a:1"]


def test_what_fails_is_tried_again_later_and_later():
    now, current, waits = NOW, state(alert()), []
    for _ in range(7):
        titles, current = send(current, now=now, error="no route")
        assert titles
        waits.append(current.channels["team"].retry_at - now)
        assert send(current, now=now + waits[-1] - 1)[0] == []
        now += waits[-1] + 60
    assert waits == [5, 15, 60, 300, 900, 900, 900]
    assert current.channels["team"].last_error == "no route"
    titles, current = send(current, now=now)
    assert titles
    assert current.channels["team"].failures == 0
    assert current.channels["team"].last_error is None
    assert current.channels["team"].last_sent_at == now
    assert send(current, now=now + 60)[0] == []


def test_channels_do_not_hold_up_each_other():
    _, after = send(state(alert()), error="no route")
    assert send(after, channel="other")[0]


def test_an_alert_that_ended_before_it_could_be_told_is_not_told():
    _, after = send(state(alert()), error="no route")
    ended = replace(
        after, alerts=[replace(after.alerts[0], state="resolved", resolved_at=NOW + 20)]
    )
    assert send(ended, now=NOW + 60)[0] == []
