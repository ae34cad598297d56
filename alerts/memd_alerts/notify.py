"""Who is to be told what: compares alerts with what each channel was told. Pure functions.

Because only the difference counts, a restart repeats nothing, an alert that came and went while a
channel could not be reached is not told at all, and what a rate limit holds back is told later, in
one message.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from memd_alerts.state import Alert, AlertState, ChannelState, State, label_key

RATE_WINDOW_SECONDS = 60.0
_RETRY_SECONDS = (5.0, 15.0, 60.0, 300.0, 900.0)


@dataclass(frozen=True)
class Policy:
    """What a channel takes.

    Args:
        severities: Of alerts it is told about.
        send_resolved: Whether it is told when one ends.
        per_minute: Most messages.
    """

    severities: frozenset[str] = frozenset({"page", "ticket"})
    send_resolved: bool = True
    per_minute: int = 6


@dataclass(frozen=True)
class Message:
    """One notification.

    Args:
        channel: Name.
        kind: firing if any of the alerts is.
        alerts: What it tells.
        title: One line.
        body: A line or more for each alert.
    """

    channel: str
    kind: Literal["firing", "resolved"]
    alerts: tuple[Alert, ...]
    title: str
    body: str


@dataclass(frozen=True)
class Plan:
    """What to send over one channel now, and the alerts that a silence or the limit holds back."""

    messages: tuple[Message, ...] = ()
    held: tuple[Alert, ...] = ()


def plan(state: State, channel: str, policy: Policy, now: float, runbooks: str) -> Plan:
    """The messages a channel is due.

    Alerts of one rule share a message; when the rate limit leaves no room for that, all share one.

    Args:
        state: Alerts, silences, and how the channel did.
        channel: Its name.
        policy: What it takes.
        now: Unix seconds.
        runbooks: Where the runbook pages are.
    """
    due = [alert for alert in state.alerts if is_due(alert, channel, policy)]
    held = tuple(each for each in due if news(each) == "firing" and state.silenced(each, now))
    spoken = [each for each in due if each not in held]
    past = state.channels.get(channel, ChannelState())
    if now < past.retry_at:
        return Plan((), held)
    room = policy.per_minute - len(_recent(past, now))
    if room <= 0:
        return Plan((), tuple(due))
    groups: dict[tuple[str, str], list[Alert]] = {}
    for alert in spoken:
        groups.setdefault((alert.rule, news(alert)), []).append(alert)
    parts = list(groups.values()) if len(groups) <= room else [spoken]
    return Plan(tuple(_message(channel, part, runbooks) for part in parts), held)


def delivered(state: State, message: Message, now: float, error: str | None) -> State:
    """The state after a message was sent, or could not be.

    Args:
        state: Of now; alerts may have changed since the message was planned.
        message: What was sent.
        now: Unix seconds.
        error: Why it failed; None: it arrived.
    """
    old = state.channels.get(message.channel, ChannelState())
    recent = _recent(old, now)
    if error is not None:
        wait = _RETRY_SECONDS[min(old.failures, len(_RETRY_SECONDS) - 1)]
        new = replace(
            old,
            sent_at=[*recent, now],
            failures=old.failures + 1,
            retry_at=now + wait,
            last_error=error,
        )
        return replace(state, channels={**state.channels, message.channel: new})
    new = ChannelState([*recent, now], 0, 0.0, now, None)
    told = {(alert.rule, label_key(alert.labels)): news(alert) for alert in message.alerts}
    alerts = [
        replace(alert, told={**alert.told, message.channel: told[place]})
        if (place := (alert.rule, label_key(alert.labels))) in told
        else alert
        for alert in state.alerts
    ]
    return replace(state, alerts=alerts, channels={**state.channels, message.channel: new})


def news(alert: Alert) -> AlertState:
    """What can be told of it: it fires, or it does not."""
    return "firing" if alert.state == "firing" else "resolved"


def _recent(channel: ChannelState, now: float) -> list[float]:
    return [at for at in channel.sent_at if 0 <= now - at < RATE_WINDOW_SECONDS]


def is_due(alert: Alert, channel: str, policy: Policy) -> bool:
    """Whether a channel has not been told the news of an alert."""
    if alert.labels["severity"] not in policy.severities:
        return False
    told = alert.told.get(channel)
    if news(alert) == "firing":
        return told != "firing"
    return told == "firing" and policy.send_resolved


def _message(channel: str, alerts: Iterable[Alert], runbooks: str) -> Message:
    alerts = tuple(alerts)
    firing = [each for each in alerts if news(each) == "firing"]
    rules = sorted({each.rule for each in alerts})
    instance = alerts[0].labels.get("instance")
    where = f" on {instance}" if instance else ""
    count = f" ({len(alerts)})" if len(alerts) > 1 else ""
    kind: Literal["firing", "resolved"] = "firing" if firing else "resolved"
    title = f"[{kind.upper()}] {', '.join(rules)}{count}{where}"
    body = "\n\n".join(_lines(alert, runbooks) for alert in alerts)
    return Message(channel, kind, alerts, title, body)


def _lines(alert: Alert, runbooks: str) -> str:
    ended = ""
    if news(alert) == "resolved" and alert.resolved_at is not None and alert.fired_at is not None:
        minutes = (alert.resolved_at - alert.fired_at) / 60
        why = "no data for an hour" if alert.lost else "resolved"
        ended = f"\n{why} after {minutes:.1f} min"
    labels = ", ".join(f"{name}={value}" for name, value in sorted(alert.labels.items()))
    severity = alert.labels["severity"]
    return f"{severity}: {alert.summary}{ended}\n{labels}\n{runbooks}/{alert.rule}.md"
