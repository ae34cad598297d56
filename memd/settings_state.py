"""The state of settings, and what follows from a change: pure, no I/O.

`memd.settings` asks for the next state, has it put in force, and then holds it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memd.config import LIVE_KEYS, Settings, build, dump, flatten, leaves
from memd.config_sources import Loaded
from memd.errors import MemdError, SettingsError
from memd.settings_history import (
    Layers,
    Life,
    Override,
    Revision,
    Source,
    layers,
    taken_back,
)

KEPT_REVISIONS = 2000  # older ones are in the database only, and cannot be undone
_SLACK = 500  # trimmed in pieces of this

Changes = dict[str, dict[str, Any]]  # dotted key -> {"old", "new"}, in base units


class StaleRevision(MemdError):
    """A change was made against settings that are no longer in force."""

    def __init__(self, given: int, current: int) -> None:
        super().__init__(f"the change is based on revision {given}, the current one is {current}")
        self.current = current


class Unconfirmed(MemdError):
    """A change waits to be confirmed and this one gets in its way; or none waits."""


@dataclass(frozen=True)
class Author:
    """Who changes settings, and why."""

    who: str
    reason: str
    source: Source = "api"


@dataclass(frozen=True)
class Pending:
    """A change that reverts by itself unless it is confirmed.

    Args:
        row: The change.
        deadline: Monotonic seconds.
    """

    row: Revision
    deadline: float


@dataclass(frozen=True)
class Reload:
    """How the sources were read the last time.

    Args:
        time: Unix seconds.
        error: What was wrong; None: nothing.
        succeeded_at: Unix seconds of the last time that nothing was.
    """

    time: float
    error: str | None
    succeeded_at: float


@dataclass(frozen=True)
class State:
    """Everything that the next state depends on.

    Args:
        base: What the sources say, by dotted key, in base units.
        settings: The tree in force.
        rows: The history, oldest first, never empty.
        life: How this run of the daemon began.
        layers: The live values that follow from the history.
        before: The live values before the first row.
        pending: What waits to be confirmed.
    """

    base: Mapping[str, Any]
    settings: Settings
    rows: tuple[Revision, ...]
    life: Life
    layers: Layers = field(default_factory=Layers)
    before: Layers = field(default_factory=Layers)
    pending: Pending | None = None

    @property
    def revision(self) -> int:
        """The latest."""
        return self.rows[-1].revision

    def beginning(self, number: int, saved: Mapping[str, Override]) -> "State":
        """The state of a start after revision `number`, with values of earlier lives.

        Raises:
            SettingsError: the tree would not be valid with them.
        """
        start = replace(self.rows[-1], revision=number + 1)
        life = Life(start.revision, saved)
        return replace(self, rows=(*self.rows[:-1], start), life=life).settled()

    def recalling(self, earlier: Sequence[Revision]) -> "State":
        """The state of a start with the rows of earlier lives, oldest first, before it."""
        rows = (*earlier[-KEPT_REVISIONS:], *self.rows)
        number = max(self.revision - 1, rows[-2].revision)
        return replace(self, rows=rows).beginning(number, self.life.saved)

    def pending_without(self, undo: Revision) -> Pending | None:
        """What still waits to be confirmed after an undo."""
        waits = self.pending is not None and self.pending.row.revision != undo.undoes
        return self.pending if waits else None

    def settled(self) -> "State":
        """The same, with layers and tree as they follow from the history.

        Raises:
            SettingsError: the tree would not be valid.
        """
        unconfirmed = self.pending.row.revision if self.pending is not None else None
        gone = taken_back(self.rows)
        found = layers(self.rows, gone, self.life, self.before, unconfirmed)
        live = {key: override.value for key, override in found.in_force.items()}
        return replace(self, layers=found, settings=build({**self.base, **live}))

    def then(
        self, row: Revision, pending: Pending | None, base: Mapping[str, Any] | None = None
    ) -> "State":
        """The state after a row; its `changes` tell what differs then.

        Args:
            row: `changes` holds at least the keys it is about; a change's new values are taken
                from there.
            pending: What waits to be confirmed then.
            base: What the sources say then; None: as before.

        Raises:
            SettingsError: the tree would not be valid then, or once `pending` has reverted.
        """
        base = self.base if base is None else base
        after = replace(self, base=base, rows=(*self.rows, row), pending=pending).settled()
        after._check_revert()
        old, new = flatten(dump(self.settings)), flatten(dump(after.settings))
        changes = {
            key: {**row.changes.get(key, {}), "old": old[key], "new": new[key]}
            for key in new
            if key in row.changes or new[key] != old[key]
        }
        row = replace(row, changes=changes)
        if pending is not None and pending.row.revision == row.revision:
            pending = replace(pending, row=row)
        return replace(after, rows=(*self.rows, row), pending=pending)._trimmed()

    def validate(
        self, changes: Mapping[str, Any], reset: Iterable[str] = (), persist: bool = False
    ) -> tuple[Settings, Changes]:
        """The tree after changes, and what a revision would record.

        Args:
            changes: Dotted keys and values, as people write them.
            reset: Keys whose live values are given up for what the sources say.
            persist: The values are to be kept over a restart.

        Raises:
            SettingsError: unknown or not live keys, or values that are wrong alone or together.
            Unconfirmed: another change of these keys waits to be confirmed.
        """
        flat, reset = flatten(changes), set(reset)
        problems = {key: _not_live(key) for key in (*flat, *reset) if key not in LIVE_KEYS}
        problems |= dict.fromkeys(flat.keys() & reset, "is both changed and reset")
        if problems:
            raise SettingsError(problems)
        old = flatten(dump(self.settings))
        proposed = build({**old, **flat, **{key: self.base[key] for key in reset}})
        new = flatten(dump(proposed))
        differs: Changes = {}
        for key in new:
            pair = {"old": old[key], "new": new[key]}
            if key in reset and (key in self.layers.in_force or key in self.layers.saved):
                differs[key] = {**pair, "reset": True}
            elif key in flat and (new[key] != old[key] or (persist and not self._keeps(key, new))):
                differs[key] = pair
        if self.pending is not None and (both := self.pending.row.changes.keys() & differs.keys()):
            raise Unconfirmed(
                f"revision {self.pending.row.revision} changes {', '.join(sorted(both))} too and "
                "waits to be confirmed: confirm or undo it first"
            )
        return proposed, differs

    def differences(self, loaded: Loaded) -> dict[str, dict[str, Any]]:
        """Where what is in force differs from freshly read sources, or would after a restart.

        Returns:
            Key -> `in_force`, `sources` (what they say) and `source` (which one says it),
            `after_restart`, with the values that are kept.
        """
        said = flatten(dump(loaded.settings))
        kept = {key: override.value for key, override in self.layers.saved.items()}
        now = flatten(dump(self.settings))
        return {
            key: {
                "in_force": now[key],
                "sources": value,
                "source": loaded.origins[key],
                "after_restart": kept.get(key, value),
            }
            for key, value in said.items()
            if now[key] != value or kept.get(key, value) != value
        }

    def _keeps(self, key: str, new: Mapping[str, Any]) -> bool:
        return key in self.layers.saved and self.layers.saved[key].value == new[key]

    def _check_revert(self) -> None:
        """Whether what is pending could still be taken back. Raises SettingsError."""
        if self.pending is None:
            return
        number = self.pending.row.revision
        back = Revision(self.revision + 1, 0.0, "", "", "revert", {}, undoes=number)
        try:
            replace(self, rows=(*self.rows, back), pending=None).settled()
        except SettingsError as error:
            then = f"once revision {number} reverts by itself: "
            raise SettingsError({k: then + why for k, why in error.problems.items()}) from None

    def _trimmed(self) -> "State":
        if len(self.rows) <= KEPT_REVISIONS + _SLACK:
            return self
        last = self.pending.row.revision if self.pending is not None else self.revision
        old = [row for row in self.rows[:_SLACK] if row.revision < last]
        before = layers(old, taken_back(self.rows), self.life, self.before)
        return replace(self, rows=self.rows[len(old) :], before=before)


def _not_live(key: str) -> str:
    return "cannot be changed while the daemon runs" if key in leaves() else "unknown setting"


def reload_results(before: State, after: State, said: Mapping[str, Any]) -> Changes:
    """What a reload did: for each key {"result", "old", "new"}.

    Args:
        before: The state before it.
        after: The state after it.
        said: What all sources say, by dotted key.
    """
    old, new = flatten(dump(before.settings)), flatten(dump(after.settings))
    return {key: _result(key, old[key], new[key], value) for key, value in said.items()}


def _result(key: str, old: Any, new: Any, said: Any) -> dict[str, Any]:
    if new != old:
        return {"result": "applied", "old": old, "new": new}
    if said == new:
        return {"result": "unchanged", "old": new, "new": new}
    result = "overridden" if key in LIVE_KEYS else "needs_restart"
    return {"result": result, "old": new, "new": said}
