"""Settings in force and how they came about: revisions, history, undo.

A change is validated as a whole tree, applied by the engine, and only then recorded. Nothing here
does I/O: the caller passes the function that applies. Used on the event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memd.config import LIVE_KEYS, Settings, build, dump, flatten, leaves
from memd.errors import MemdError, SettingsError

Apply = Callable[[int, dict[str, Any]], Awaitable[object]]  # revision, dotted key -> value
Kind = Literal["start", "change", "undo"]


class StaleRevision(MemdError):
    """A change was made against settings that are no longer in force."""

    def __init__(self, given: int, current: int) -> None:
        super().__init__(f"the change is based on revision {given}, the current one is {current}")
        self.current = current


class NothingToUndo(MemdError):
    """Every change has been undone."""


@dataclass(frozen=True)
class Revision:
    """One row of the history.

    Args:
        revision: Counts from 1, the start.
        time: Unix seconds.
        changes: Dotted key -> {"old", "new"}, in base units.
        undoes: For kind `undo`: the revision whose change was taken back.
    """

    revision: int
    time: float
    who: str
    reason: str
    kind: Kind
    changes: dict[str, dict[str, Any]]
    undoes: int | None = None


class LiveSettings:
    """The tree in force and its history, in memory.

    Args:
        initial: As loaded at the start: revision 1.
        clock: Unix seconds.
    """

    def __init__(self, initial: Settings, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()
        self.current = initial
        self.history = [Revision(1, clock(), "local", "start", "start", {})]

    @property
    def revision(self) -> int:
        """Of the settings in force."""
        return self.history[-1].revision

    def validate(self, changes: Mapping[str, Any]) -> tuple[Settings, dict[str, dict[str, Any]]]:
        """The tree after changes, and what would differ, as {key: {"old", "new"}}.

        Raises:
            SettingsError: unknown or not live keys, or values that are wrong alone or together.
        """
        flat = flatten(changes)
        problems = {
            key: "cannot be changed while the daemon runs" if key in leaves() else "unknown setting"
            for key in flat
            if key not in LIVE_KEYS
        }
        if problems:
            raise SettingsError(problems)
        old = flatten(dump(self.current))
        proposed = build({**old, **flat})
        new = flatten(dump(proposed))
        return proposed, {
            key: {"old": old[key], "new": new[key]} for key in new if new[key] != old[key]
        }

    async def change(
        self,
        changes: Mapping[str, Any],
        base_revision: int,
        who: str,
        reason: str,
        apply: Apply,
    ) -> dict[str, dict[str, Any]]:
        """Put changes in force, all or none.

        Args:
            changes: Dotted keys and values, as people write them.
            base_revision: The revision the author saw.
            who: Recorded.
            reason: Recorded.
            apply: Puts values in force; when it raises, nothing is recorded.

        Returns:
            What differs now; empty when nothing does, and then there is no new revision.

        Raises:
            StaleRevision: `base_revision` is not the current one.
            SettingsError: see `validate`.
        """
        async with self._lock:
            if base_revision != self.revision:
                raise StaleRevision(base_revision, self.revision)
            return await self._put(changes, who, reason, apply, "change", None)

    async def undo(self, who: str, reason: str, apply: Apply) -> dict[str, dict[str, Any]]:
        """Take back the latest change that is not yet undone.

        Raises:
            NothingToUndo: there is none.
        """
        async with self._lock:
            undone = {row.undoes for row in self.history}
            for row in reversed(self.history):
                if row.kind == "change" and row.revision not in undone:
                    old = {key: pair["old"] for key, pair in row.changes.items()}
                    return await self._put(old, who, reason, apply, "undo", row.revision)
            raise NothingToUndo("every change has been undone")

    async def _put(
        self,
        changes: Mapping[str, Any],
        who: str,
        reason: str,
        apply: Apply,
        kind: Kind,
        undoes: int | None,
    ) -> dict[str, dict[str, Any]]:
        proposed, differs = self.validate(changes)
        if not differs:
            return {}
        revision = self.revision + 1
        await apply(revision, {key: pair["new"] for key, pair in differs.items()})
        self.current = proposed
        self.history.append(Revision(revision, self._clock(), who, reason, kind, differs, undoes))
        return differs
