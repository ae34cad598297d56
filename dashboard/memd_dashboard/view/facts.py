"""What the rules of the diagnosis look at, and what they find."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memd_dashboard.scrape import Window
from memd_dashboard.snapshot import JSON


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Args:
        title: The cause, as a sentence.
        severity: From 0, a hint, to 1, requests fail; the order.
        evidence: Measured facts, a sentence each.
        action: The one thing to do.
        key: The setting to change, where the action is one.
        value: What to set it to, as typed.
        page: Where to look or act otherwise.
    """

    title: str
    severity: float
    evidence: tuple[str, ...]
    action: str
    key: str | None = None
    value: str | None = None
    page: str | None = None


@dataclass(frozen=True)
class Facts:
    """What the rules look at."""

    pool: JSON
    window: Window
    settings: Mapping[str, Any]
    requests: list[JSON]
    prefixes: list[JSON]
    tenants: list[JSON] = field(default_factory=list)

    def grown(self, name: str, **labels: str) -> float:
        """How much a counter grew; 0 when it is not told."""
        return self.window.increase(name, **labels) or 0.0

    @property
    def waiting(self) -> list[JSON]:
        """Requests that wait."""
        return [row for row in self.requests if row.get("state") == "waiting"]
