"""What is told of changes: rows of the table `settings_revisions`, events, and counts."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import product
from typing import Any, Literal, Protocol, get_args

from memd.config import LIVE_KEYS
from memd.config_words import written
from memd.settings_history import Kind, Outcome, Revision, Source
from memd.settings_state import KEPT_REVISIONS, Author
from memd.store.reads import rows_of
from memd.store.store import Store

SOURCES: tuple[Source, ...] = get_args(Source)
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
MAX_MESSAGE_CHARACTERS = 1000
_OUTCOME_OF: dict[Kind, Outcome] = {"undo": "reverted", "revert": "reverted"}
_FIELDS = tuple(field.name for field in fields(Revision))


class Journal(Protocol):
    """The part of the store that settings need. Neither call blocks or raises."""

    def add_rows(self, table: Literal["settings_revisions"], rows: Sequence[Any], /) -> None:
        """Rows for the database, which may be dropped."""

    def add_event(self, kind: str, message: str, details: dict[str, Any], /) -> None:
        """Something that happened to the daemon."""


class Recorder:
    """Counts, and tells the journal.

    Attributes:
        journal: None: there is none.
        counts: Changes by (key, source, outcome), every one from the start.
    """

    def __init__(self) -> None:
        self.journal: Journal | None = None
        self.counts = dict.fromkeys(product(sorted(LIVE_KEYS), SOURCES, OUTCOMES), 0)

    def record(self, row: Revision) -> None:
        """A revision is in force."""
        source = row.source or "api"
        for key in LIVE_KEYS.intersection(row.changes):
            self.counts[key, source, _OUTCOME_OF.get(row.kind, "applied")] += 1
        if self.journal is not None:
            self.journal.add_rows("settings_revisions", [to_row(row)])
        if row.kind not in ("start", "reload"):  # which have events of their own
            author = Author(row.who, row.reason, source)
            self.tell(f"settings_{row.kind}", describe(row), author)

    @contextlib.contextmanager
    def refusals(self, keys: Iterable[str], author: Author) -> Iterator[None]:
        """Whatever is raised inside means that a change of these keys was refused."""
        try:
            yield
        except Exception as error:
            chosen = sorted(LIVE_KEYS.intersection(keys))
            for key in chosen:
                self.counts[key, author.source, "rejected"] += 1
            what = ", ".join(chosen) or "settings that are not live"
            self.tell("settings_rejected", f"a change of {what} was refused: {error}", author)
            raise

    def tell(self, kind: str, message: str, author: Author) -> None:
        """An event for the journal; what clients wrote is cut, and cleared of U+0000."""
        if self.journal is not None:
            message = message[:MAX_MESSAGE_CHARACTERS].replace("\0", "\N{REPLACEMENT CHARACTER}")
            self.journal.add_event(kind, message, asdict(author))


def describe(row: Revision) -> str:
    """A revision in one line: what differs, in words."""
    pairs = row.changes.items()
    words = [f"{key} {written(key, p['old'])} → {written(key, p['new'])}" for key, p in pairs]
    back = f", takes back revision {row.undoes}" if row.undoes is not None else ""
    return f"revision {row.revision}{back}: {'; '.join(words) or 'nothing differs'}"


def to_row(revision: Revision) -> dict[str, Any]:
    """A revision as a row of the table."""
    return asdict(revision)


def from_row(row: Mapping[str, Any]) -> Revision:
    """A row of the table as a revision; what its columns do not know is left out."""
    values = {name: row[name] for name in _FIELDS}
    return Revision(**{**values, "persist": bool(values["persist"])})


async def recall_revisions(store: Store) -> list[Revision]:
    """The latest revisions that the database holds, oldest first.

    Raises:
        StoreError: the database cannot be read.
    """
    rows, _ = await store.query(rows_of("settings_revisions", limit=KEPT_REVISIONS))
    return sorted(map(from_row, rows), key=lambda row: row.revision)
