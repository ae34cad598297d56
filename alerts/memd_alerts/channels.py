"""Channels over which people are told: a YAML file of apprise URLs. URLs are secrets.

on-call: pagerduty://KEY
team: {url: slack://TOKEN, severities: [ticket], resolved: false, per_minute: 3}
"""

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import apprise
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memd_alerts.notify import Message, Policy
from memd_alerts.rules import Severity

ALERTMANAGER = "alertmanager"  # the name under which deliveries to Alertmanager are counted
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_MAX_CHANNELS = 32
# It logs URLs that it refuses, and servers' answers; what matters is told here.
logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)


class ChannelsError(Exception):
    """A file of channels cannot be used; the message names the channel, never its URL."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)
    url: str
    severities: tuple[Severity, ...] = ("page", "ticket")
    resolved: bool = True
    per_minute: Annotated[int, Field(ge=1, le=60)] = 6


@dataclass(frozen=True)
class Channel:
    """One way to tell people.

    Args:
        name: Of the file.
        kind: The scheme of its URL, such as `slack`.
        policy: What it takes.
        url: Secret.
    """

    name: str
    kind: str
    policy: Policy
    url: str = field(repr=False)

    def send(self, message: Message) -> str | None:
        """Send and wait, for as long as apprise's own limits. Call it on a thread.

        Returns:
            Why it failed, without the URL; None: it was accepted.
        """
        kind = apprise.NotifyType.FAILURE
        if message.kind == "resolved":
            kind = apprise.NotifyType.SUCCESS
        return self._notify(message.title, message.body, kind)

    def test(self, who: str) -> str | None:
        """Send a message that says that it is a test. Call it on a thread."""
        body = f"This is a test of memd's channel {self.name}, asked for by {who}."
        return self._notify(f"[TEST] memd channel {self.name}", body, apprise.NotifyType.INFO)

    def _notify(self, title: str, body: str, kind: Any) -> str | None:
        sender = apprise.Apprise()
        sender.add(self.url)
        try:
            sent = sender.notify(body=body, title=title, notify_type=kind)
        except Exception as error:  # a plugin's fault must not end the thread
            return f"{self.kind}: {type(error).__name__}"
        return None if sent else f"{self.kind}: not delivered"


def load_channels(path: Path) -> dict[str, Channel]:
    """Read a file of channels.

    Raises:
        ChannelsError: it cannot be read, or a channel in it is wrong.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise ChannelsError(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    except yaml.YAMLError:  # its message would quote the file
        raise ChannelsError(f"{path} is not YAML") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ChannelsError(f"{path} must map names to URLs")
    if len(data) > _MAX_CHANNELS:
        raise ChannelsError(f"{path} has {len(data)} channels, the limit is {_MAX_CHANNELS}")
    return {str(name): _channel(path, str(name), entry) for name, entry in data.items()}


def _channel(path: Path, name: str, entry: object) -> Channel:
    if _NAME.fullmatch(name) is None or name == ALERTMANAGER:
        raise ChannelsError(
            f"{path}: the name {name[:60]!r} is not allowed: up to 40 lower-case letters, digits, "
            f"- and _, and not {ALERTMANAGER}"
        )
    try:
        fields = _Entry.model_validate({"url": entry} if isinstance(entry, str) else entry)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise ChannelsError(f"{path}: channel {name}: {place}: {fault['msg']}") from None
    if apprise.Apprise.instantiate(fields.url) is None:
        raise ChannelsError(f"{path}: channel {name}: apprise cannot use its URL")
    kind = fields.url.partition(":")[0].lower()
    policy = Policy(frozenset(fields.severities), fields.resolved, fields.per_minute)
    return Channel(name, kind, policy, fields.url)
