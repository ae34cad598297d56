"""Which decoding sequences begin with the same pages, so that attention reads those once."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from memd.engine.plan import Chunk
from memd.pool.sequence import PoolSequence
from memd.types import PageId

MAX_GROUPS = 8  # each unused place for a group costs idle programs
LEAST_SAVED_TOKENS = 4096  # below it a second pass costs more than it saves


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows [first_row, first_row + num_rows) of a batch begin with the same `num_pages` pages."""

    first_row: int
    num_rows: int
    num_pages: int

    @property
    def saved_pages(self) -> int:
        """Pages that need not be read again."""
        return (self.num_rows - 1) * self.num_pages


class PrefixGrouper:
    """Orders decoding sequences so that those with a common beginning are neighbours.

    One page never stands for two beginnings: sequences with the same page at a place have the same
    pages up to there. The page that a sequence is writing is nobody else's.

    Args:
        refs: References to each page, `Pages.refs`.
        page_tokens: Tokens in a page.
    """

    def __init__(self, refs: Sequence[int], page_tokens: int) -> None:
        self._refs = refs
        self._least_pages = -(-LEAST_SAVED_TOKENS // page_tokens)
        self._sequences: list[PoolSequence | None] = []
        self._order: list[int] = []
        self._groups: list[PrefixGroup] = []

    def group(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[PrefixGroup]]:
        """The chunks in the order of their rows, and the groups worth a pass of their own.

        Found anew only when other sequences are decoding than the last time.
        """
        sequences = [chunk.request.sequence for chunk in chunks]
        if sequences != self._sequences:
            self._sequences = sequences
            self._find([sequence.pages if sequence else [] for sequence in sequences])
        if not self._groups:
            return chunks, []
        return [chunks[index] for index in self._order], self._groups

    def _find(self, tables: list[list[PageId]]) -> None:
        self._groups = []
        shared = [index for index, pages in enumerate(tables) if pages and self._refs[pages[0]] > 1]
        if len(shared) < 2:
            return
        shared.sort(key=lambda index: tables[index])
        found: list[PrefixGroup] = []
        first, common = 0, len(tables[shared[0]])
        for row in range(1, len(shared) + 1):
            size = row - first
            if row < len(shared):
                both = min(common, _common_pages(tables[shared[row - 1]], tables[shared[row]]))
                if size * both >= (size - 1) * common and both:
                    common = both
                    continue
            found.append(PrefixGroup(first, size, common))
            first, common = row, len(tables[shared[row]]) if row < len(shared) else 0
        worth = [group for group in found if group.saved_pages >= self._least_pages]
        worth.sort(key=lambda group: -group.saved_pages)
        self._groups = worth[:MAX_GROUPS]
        rest = set(range(len(tables))) - set(shared)
        self._order = shared + sorted(rest)


def _common_pages(one: list[PageId], other: list[PageId]) -> int:
    """How many leading pages two sequences share."""
    least = min(len(one), len(other))
    return bisect_left(range(least), True, key=lambda index: one[index] != other[index])
