"""The daemon's side of alerts: samples in, notifications out, and the one owner of their state.

All state is changed on the event loop, under one lock. It is kept in a small file of the state
directory rather than in the database: whoever is to be woken must not depend on a database that is
full, locked or gone. The database gets incidents, silences and notifications for looking back.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from memd_alerts.alertmanager import RESEND_SECONDS, payload, post, test_payload
from memd_alerts.channels import ALERTMANAGER, Channel, ChannelsError
from memd_alerts.evaluate import Change, evaluate
from memd_alerts.history import History, Sample
from memd_alerts.notify import Message, Policy, delivered, is_due, news, plan
from memd_alerts.rules import RuleFile, RulesError
from memd_alerts.state import Alert, ChannelState, Silence, State
from memd_alerts.values import Values
from msgspec.structs import replace

from memd.alert_files import ChannelsFile, StateFile
from memd.alert_rules import matcher_fault, read_rules
from memd.background import in_thread
from memd.config_operator import AlertSettings
from memd.errors import MemdError
from memd.store.tables import TableName

STATE_FILE = "alerts.json"
MAX_SILENCES = 100
_STOP_SECONDS = 5.0
_log = logging.getLogger(__name__)


class AlertError(MemdError):
    """The alert rules, channels or a silence cannot be used."""


class Kept(Protocol):
    """Where history goes: `memd.store.store.Store`."""

    def add_event(self, kind: str, message: str, details: dict[str, Any] | None = None) -> None:
        """Something that happened, now."""

    def add_rows(self, name: TableName, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of a table."""


class Alerting:
    """Evaluates the rules when asked to, and tells the channels.

    Args:
        settings: Rules, channels, where runbooks are.
        directory: The state directory.
        instance: Label of all alerts.
        samples: What a scrape would show; called on a thread.
        store: Gets the history.
        clock: Unix seconds.

    Attributes:
        rules: In force.
        state: Of now.
    """

    def __init__(
        self,
        settings: AlertSettings,
        directory: Path,
        instance: str,
        samples: Callable[[], Iterable[Sample]],
        store: Kept,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._file = StateFile(directory / STATE_FILE)
        self._channels_file = ChannelsFile(settings.channels)
        self._instance = instance
        self._samples = samples
        self._store = store
        self._clock = clock
        self._lock = asyncio.Lock()
        self._channels: dict[str, Channel] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._held: set[tuple[str, str, str]] = set()
        self._refreshed_at = 0.0
        self._counts: dict[tuple[str, str], int] = {}
        self.runbooks = settings.runbooks.rstrip("/")
        self.rules = RuleFile(rules=())
        self.state = State()
        self._history = History(self.rules)

    def start(self) -> None:
        """Read rules, channels and the state of before.

        Raises:
            AlertError: the rules or channels cannot be used.
        """
        try:
            self.rules = read_rules(self._settings.rules)
            self._channels = self._channels_file.read()
        except (RulesError, ChannelsError) as error:
            raise AlertError(str(error)) from None
        self._history = History(self.rules)
        self.state = self._file.load()

    async def stop(self) -> None:
        """Let messages under way arrive, for a few seconds, and save."""
        if self._sending:
            await asyncio.wait(self._sending.values(), timeout=_STOP_SECONDS)
        for task in list(self._sending.values()):
            task.cancel()
        async with self._lock:
            await asyncio.to_thread(self._file.save, self.state)

    @property
    def channels(self) -> dict[str, Channel]:
        """By name; Alertmanager is none of them."""
        return self._channels

    @property
    def alertmanager(self) -> str | None:
        """Its URL."""
        return self._settings.alertmanager

    @property
    def firing_counts(self) -> dict[str, int]:
        """Alerts that fire now, by severity."""
        firing = [each for each in self.state.alerts if news(each) == "firing"]
        severities = [each.labels["severity"] for each in firing]
        return {name: severities.count(name) for name in ("page", "ticket")}

    @property
    def notification_counts(self) -> dict[tuple[str, str], int]:
        """Notifications by (channel, "sent", "failed" or "suppressed"); every channel is there."""
        names = [*self._channels, *([ALERTMANAGER] if self.alertmanager else [])]
        outcomes = ("sent", "failed", "suppressed")
        return {
            (name, outcome): self._counts.get((name, outcome), 0)
            for name in names
            for outcome in outcomes
        }

    def recorded(self) -> list[tuple[str, dict[str, str], float]]:
        """Name, labels and value of the file's records, of the latest samples; no NaN."""
        if self._history.last_at is None:
            return []
        values = Values(self.rules, self._history, self._history.last_at)
        return [
            (record.name, dict(labels), value)
            for record in self.rules.records
            for labels, value in values.recorded(record).items()
            if value == value
        ]

    def values(self) -> Values | None:
        """Expressions at the latest samples; None before the first."""
        at = self._history.last_at
        return None if at is None else Values(self.rules, self._history, at)

    async def evaluate(self) -> None:
        """Take samples, evaluate the rules, and have sent what is due. The job's work."""
        samples = await asyncio.to_thread(lambda: list(self._samples()))
        async with self._lock:
            now = self._clock()
            self._channels = await asyncio.to_thread(self._channels_file.current)
            before = self.state
            self.state, changes = await asyncio.to_thread(self._evaluated, now, samples)
            for change in changes:
                self._record(change)
            self._send_due(now)
            if self.state.alerts or before.alerts or self.state.silences != before.silences:
                await asyncio.to_thread(self._file.save, self.state)

    def runbook(self, rule: str) -> str:
        """Where the page about a rule is."""
        return f"{self.runbooks}/{rule}.md"

    def silences(self) -> list[Silence]:
        """Those in force, the one that ends first before others."""
        now = self._clock()
        return sorted((s for s in self.state.silences if s.ends_at > now), key=lambda s: s.ends_at)

    async def silence(
        self, matchers: Mapping[str, str], seconds: float, reason: str, author: str
    ) -> Silence:
        """Tell nobody of alerts that match, for a time.

        Raises:
            AlertError: there are too many silences, or no alert could ever match.
        """
        if fault := matcher_fault(self.rules, matchers):
            raise AlertError(fault)
        async with self._lock:
            now = self._clock()
            silences = [each for each in self.state.silences if each.ends_at > now]
            if len(silences) >= MAX_SILENCES:
                raise AlertError(f"there are {len(silences)} silences, the limit is {MAX_SILENCES}")
            made = Silence(secrets.token_hex(4), dict(matchers), now, now + seconds, reason, author)
            await self._set_silences([*silences, made], made, "silenced", author)
        return made

    async def unsilence(self, silence_id: str, author: str) -> Silence | None:
        """End a silence. None: there is no such one."""
        async with self._lock:
            now = self._clock()
            found = next((each for each in self.state.silences if each.id == silence_id), None)
            if found is None or found.ends_at <= now:
                return None
            ended = replace(found, ends_at=now)
            left = [each for each in self.state.silences if each.id != silence_id]
            await self._set_silences(left, ended, "unsilenced", author)
        return ended

    async def test(self, name: str, who: str) -> str | None:
        """Send a test message and wait for it.

        Returns:
            Why it failed; None: it was accepted.

        Raises:
            KeyError: there is no such channel.
        """
        if name == ALERTMANAGER and self.alertmanager:
            url, body = self.alertmanager, test_payload(self._instance, who, self._clock())
            error = await in_thread(lambda: post(url, body), "alert-test")
        else:
            channel = self._channels[name]
            error = await in_thread(lambda: channel.test(who), "alert-test")
        self._count(name, "failed" if error else "sent")
        self._add_notification(name, "test", None, error)
        return error

    def _evaluated(self, now: float, samples: list[Sample]) -> tuple[State, list[Change]]:
        self._history.add(now, samples)
        external = {"instance": self._instance}
        return evaluate(self.rules, self._history, self.state, now, external)

    def _record(self, change: Change) -> None:
        alert = change.alert
        if change.kind in ("pending", "dropped"):
            return
        self._store.add_rows("incidents", [_incident(alert)])
        self._store.add_event(
            f"alert_{change.kind}", alert.summary, {"alert": alert.rule, "labels": alert.labels}
        )
        level = logging.WARNING if change.kind == "firing" else logging.INFO
        _log.log(level, "alert %s: %s: %s", change.kind, alert.rule, alert.summary)

    def _send_due(self, now: float) -> None:
        held: set[tuple[str, str, str]] = set()
        for name, channel in self._channels.items():
            if name in self._sending:
                held |= {each for each in self._held if each[0] == name}
                continue
            due = plan(self.state, name, channel.policy, now, self.runbooks)
            held |= {(name, alert.id, news(alert)) for alert in due.held}
            if due.messages:
                self._send(name, self._deliver(channel, due.messages))
        for name, _, _ in held - self._held:
            self._count(name, "suppressed")
        self._held = held
        if self.alertmanager and ALERTMANAGER not in self._sending:
            self._send_alertmanager(self.alertmanager, now)

    def _send_alertmanager(self, url: str, now: float) -> None:
        """What is new there; and all that fires, so that it does not end by itself."""
        past = self.state.channels.get(ALERTMANAGER, ChannelState())
        if now < past.retry_at:
            return
        fresh = [each for each in self.state.alerts if is_due(each, ALERTMANAGER, Policy())]
        refresh = now - self._refreshed_at >= RESEND_SECONDS
        firing = [each for each in self.state.alerts if refresh and news(each) == "firing"]
        if not fresh and not firing:
            return
        self._refreshed_at = now if refresh else self._refreshed_at
        ended = [each for each in fresh if each not in firing]
        body = payload([*firing, *ended], now, self._settings.evaluate_every, self.runbooks)
        message = Message(ALERTMANAGER, "firing", tuple(fresh), "", "")
        self._send(ALERTMANAGER, self._post(url, body, message))

    def _send(self, name: str, work: Any) -> None:
        task = asyncio.create_task(work)
        self._sending[name] = task
        task.add_done_callback(lambda _: self._sending.pop(name, None))

    async def _deliver(self, channel: Channel, messages: Sequence[Message]) -> None:
        for message in messages:
            error = await in_thread(lambda m=message: channel.send(m), "alert-send")  # type: ignore[misc]
            await self._done(message, error)
            if error is not None:
                return

    async def _post(self, url: str, body: list[dict[str, Any]], message: Message) -> None:
        error = await in_thread(lambda: post(url, body), "alert-send")
        if error is not None or message.alerts:
            await self._done(message, error)

    async def _done(self, message: Message, error: str | None) -> None:
        async with self._lock:
            self.state = delivered(self.state, message, self._clock(), error)
            self._count(message.channel, "failed" if error else "sent")
            for alert in message.alerts:
                self._add_notification(message.channel, news(alert), alert, error)
            if error is not None:
                _log.warning("notification over %s failed: %s", message.channel, error)
            await asyncio.to_thread(self._file.save, self.state)

    def _count(self, channel: str, outcome: str) -> None:
        self._counts[channel, outcome] = self._counts.get((channel, outcome), 0) + 1

    def _add_notification(
        self, channel: str, kind: str, alert: Alert | None, error: str | None
    ) -> None:
        failures = self.state.channels.get(channel, ChannelState()).failures
        row = {
            "time": self._clock(),
            "channel": channel,
            "kind": kind,
            "alert": alert.rule if alert else None,
            "incident_id": alert.id if alert else None,
            "outcome": "failed" if error else "sent",
            "attempts": max(1, failures),
            "error": error,
        }
        self._store.add_rows("notifications", [row])

    async def _set_silences(
        self,
        silences: list[Silence],
        about: Silence,
        kind: Literal["silenced", "unsilenced"],
        who: str,
    ) -> None:
        self.state = replace(self.state, silences=silences)
        row = {
            "id": about.id,
            "time": about.starts_at,
            "matchers": [{"name": k, "value": v} for k, v in about.matchers.items()],
            "reason": about.reason,
            "author": about.author,
            "expires_at": about.ends_at,
        }
        self._store.add_rows("silences", [row])
        matchers = ", ".join(f"{k}={v}" for k, v in about.matchers.items())
        details = {"id": about.id, "who": who, "reason": about.reason}
        self._store.add_event(f"alert_{kind}", f"{kind}: {matchers}", details)
        await asyncio.to_thread(self._file.save, self.state)


def _incident(alert: Alert) -> dict[str, Any]:
    """A row; its value is the worst since the alert began."""
    return {
        "id": alert.id,
        "time": alert.since,
        "name": alert.rule,
        "labels": alert.labels,
        "severity": alert.labels["severity"],
        "state": "lost" if alert.lost else alert.state,
        "value": alert.peak,
        "threshold": alert.threshold,
        "summary": alert.summary,
        "fired_at": alert.fired_at,
        "resolved_at": alert.resolved_at,
    }
