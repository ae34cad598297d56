"""Puts into the history what the engine found wrong with its page files."""

from collections import Counter
from typing import Any, Protocol

from memd.engine.snapshot_types import PoolSnapshot


class EventStore(Protocol):
    """Where events go."""

    def add_event(self, kind: str, message: str, details: dict[str, Any]) -> None:
        """Record one."""


class DiskEvents:
    """Compares one snapshot with the one before.

    Args:
        store: Gets an event when files were rejected or pages could not be written.
    """

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self._rejected: Counter[str] = Counter()
        self._fault: str | None = None

    def look(self, pool: PoolSnapshot) -> None:
        """See what has been added; a new engine counts from 0 again."""
        now = Counter(pool.disk_rejected_files)
        more = now if now.total() < self._rejected.total() else now - self._rejected
        self._rejected = now
        if more:
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(more.items()))
            message = f"page files of no use were removed: {counts}"
            self._store.add_event("disk_files_rejected", message, dict(more))
        fault, self._fault = self._fault, pool.disk_fault
        if self._fault is not None and self._fault != fault:
            message = f"the disk tier pauses: {self._fault}"
            self._store.add_event("disk_fault", message, {"fault": self._fault})
