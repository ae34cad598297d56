"""What the history of settings means: pure functions from revisions to the live values in force.

A revision is never changed. Undo and revert are revisions of their own that point at the one they
take back, and the live values are what is left when the history is read from its beginning. So an
undo of an undo, or of a change far back, needs no bookkeeping.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from memd.errors import MemdError

Kind = Literal["start", "change", "undo", "revert", "reload"]
Source = Literal["cli", "api", "dashboard", "file", "schedule"]
Outcome = Literal["applied", "rejected", "reverted"]


class CannotUndo(MemdError):
    """A revision cannot be taken back.

    Args:
        message: Why.
        code: `not_found`, `nothing_to_undo` or `conflict`.
        conflicts: Key -> the later revision that changed it as well.
    """

    def __init__(
        self, message: str, code: str = "nothing_to_undo", conflicts: Mapping[str, int] = {}
    ) -> None:
        super().__init__(message)
        self.code = code
        self.conflicts = dict(conflicts)


@dataclass(frozen=True)
class Revision:
    """One row of the history.

    Args:
        revision: Counts from 1, over all lives of the daemon.
        time: Unix seconds.
        changes: Dotted key -> {"old", "new"}, in base units; with {"reset": True} where a live
            value was given up for what the sources say.
        undoes: For `undo` and `revert`: the revision that is taken back.
        confirm_by: Unix seconds; reverts by itself then, unless it is confirmed.
        persist: The new values are kept over a restart.
    """

    revision: int
    time: float
    who: str
    reason: str
    kind: Kind
    changes: dict[str, dict[str, Any]]
    undoes: int | None = None
    confirm_by: float | None = None
    source: Source | None = None
    persist: bool = False


@dataclass(frozen=True)
class Override:
    """A live value: it lies over what the sources say, and tells who put it there."""

    value: Any
    revision: int
    time: float
    who: str
    reason: str


@dataclass(frozen=True)
class Layers:
    """Live values by key.

    Args:
        in_force: Until the daemon ends.
        saved: What the next start will begin with.
    """

    in_force: Mapping[str, Override] = field(default_factory=dict)
    saved: Mapping[str, Override] = field(default_factory=dict)


@dataclass(frozen=True)
class Life:
    """How this run of the daemon began.

    Args:
        start: Its first revision.
        saved: The values that were kept from earlier lives.
    """

    start: int
    saved: Mapping[str, Override] = field(default_factory=dict)


def taken_back(rows: Sequence[Revision]) -> dict[int, int]:
    """Revision -> the one that took it back, for all that are not in effect."""
    gone: dict[int, int] = {}
    for row in reversed(rows):  # what takes back comes later, and may be taken back itself
        if row.undoes is not None and row.revision not in gone:
            gone.setdefault(row.undoes, row.revision)
    return gone


def layers(
    rows: Iterable[Revision],
    gone: Mapping[int, int],
    life: Life,
    before: Layers,
    unconfirmed: int | None = None,
) -> Layers:
    """The live values after a history.

    Args:
        rows: Oldest first.
        gone: See `taken_back`.
        life: Of now; earlier lives show as `start` rows.
        before: What came before the first row.
        unconfirmed: A revision that is not saved before it is confirmed.
    """
    in_force, saved = dict(before.in_force), dict(before.saved)
    for row in rows:
        if row.kind == "start":
            if row.revision == life.start:
                kept = {
                    k: o for k, o in life.saved.items() if gone.get(o.revision, 0) < row.revision
                }
                saved = {k: o for k, o in saved.items() if k in life.saved} | kept
            in_force = dict(saved)
        elif row.kind == "change" and row.revision not in gone:
            for key, pair in row.changes.items():
                if pair.get("reset"):
                    in_force.pop(key, None)
                    saved.pop(key, None)
                    continue
                value = Override(pair["new"], row.revision, row.time, row.who, row.reason)
                in_force[key] = value
                if row.persist and row.revision != unconfirmed:
                    saved[key] = value
    return Layers(in_force, saved)


def undoable(rows: Sequence[Revision], life: Life, revision: int | None) -> Revision:
    """The row to take back.

    Args:
        rows: Oldest first.
        life: Of now.
        revision: None: the latest change that is in effect.

    Raises:
        CannotUndo: there is none, or it has been taken back, or later changes are in the way.
    """
    gone = taken_back(rows)
    if revision is None:
        for row in reversed(rows):
            if row.kind == "change" and row.revision not in gone and not _ended(row, life, gone):
                return row
        raise CannotUndo("every change has been undone")
    found = [each for each in rows if each.revision == revision]
    if not found:
        raise CannotUndo(f"there is no revision {revision} in the history", "not_found")
    row = found[0]
    if row.kind == "start":
        raise CannotUndo(f"revision {revision} is a start of the daemon and changed nothing")
    if row.kind == "reload":
        raise CannotUndo(
            f"revision {revision} was read from the sources: change them and reload again"
        )
    if revision in gone:
        raise CannotUndo(f"revision {revision} has been taken back by revision {gone[revision]}")
    conflicts = _conflicts(rows, gone, row)
    if _ended(row, life, gone) and not (row.persist and conflicts):
        raise CannotUndo(f"revision {revision} ended with the restart at revision {life.start}")
    if conflicts:
        words = ", ".join(f"{key} (revision {number})" for key, number in conflicts.items())
        raise CannotUndo(f"later changes are in the way: {words}", "conflict", conflicts)
    return row


def _ended(row: Revision, life: Life, gone: Mapping[int, int]) -> bool:
    """Whether a row is of an earlier life, and its values were not kept."""
    if row.revision >= life.start:
        return False
    kept = [life.saved.get(key) for key in row.changes]
    # A kept value that was taken back in this life shows the one before it.
    holds = (o is not None and (o.revision == row.revision or o.revision in gone) for o in kept)
    return row.kind != "change" or not row.persist or not all(holds)


def change_of(rows: Sequence[Revision], row: Revision) -> Revision:
    """The change that a row is about: for an undo the one it takes back, at the end of the chain.

    Raises:
        CannotUndo: it is too old to be in the history.
    """
    numbered = {each.revision: each for each in rows}
    while row.undoes is not None:
        if row.undoes not in numbered:
            raise CannotUndo(f"revision {row.undoes} is no longer in the history", "not_found")
        row = numbered[row.undoes]
    return row


def _conflicts(rows: Sequence[Revision], gone: Mapping[int, int], row: Revision) -> dict[str, int]:
    """Key -> the latest change in effect that came after what `row` is about."""
    about = change_of(rows, row)
    later = (
        each
        for each in rows
        if each.revision > about.revision and each.kind == "change" and each.revision not in gone
    )
    return {key: each.revision for each in later for key in each.changes if key in about.changes}
