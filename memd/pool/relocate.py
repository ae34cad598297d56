"""Gives the content of pages other page ids, everywhere they are known, in one place."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from memd.errors import InvariantError, PoolExhausted
from memd.pool.blocks import Blocks
from memd.pool.claim import Claim
from memd.pool.defrag import PageMove, PageMover, plan_emptying, plan_moves
from memd.pool.pages import Pages, PageState
from memd.pool.residency import Residency
from memd.pool.sequence import PoolSequence
from memd.types import PageId, RequestId

logger = logging.getLogger(__name__)

_MOVABLE = (PageState.WRITING, PageState.SEALED)
Table = tuple[list[PageId], int, PoolSequence | None]  # list, index in it, whose page table it is
Holders = dict[PageId, list[Table]]


class Relocator:
    """Knows who refers to a page by its id, and tells all of them when it changes.

    Args:
        pages, blocks, residency, claimed: Of one pool.
        sequences: Of the same pool, by request.

    Attributes:
        mover: Copies pages on the device; None: there is no memory behind this pool.
    """

    def __init__(
        self,
        pages: Pages,
        blocks: Blocks,
        residency: Residency,
        claimed: Claim,
        sequences: Mapping[RequestId, PoolSequence],
    ) -> None:
        self.mover: PageMover | None = None
        self._pages = pages
        self._blocks = blocks
        self._residency = residency
        self._claimed = claimed
        self._sequences = sequences

    def plan(self, max_pages: int) -> list[PageMove]:
        """Moves that may be made now, all of one format: that with more blocks to be emptied."""
        movable = self._movable()
        packed_first = self._blocks.surplus_packed_blocks > self._blocks.surplus_full_blocks
        moves = plan_moves(self._blocks, movable, max_pages, packed_first)
        moves = moves or plan_moves(self._blocks, movable, max_pages, not packed_first)
        holders = self.holders([move.source for move in moves])
        return [
            move for move in moves if len(holders[move.source]) == self._pages.refs[move.source]
        ]

    def move(self, moves: Sequence[PageMove], held: list[PageId] | None = None) -> None:
        """Give contents other places of the same format.

        State, references, pins, owner, place in the tree and in the eviction order go along, and
        the tables of all sequences are rewritten. Sources are free after it: as the device works
        in order, whoever writes them next comes after the copy.

        Args:
            moves: From `plan`, with no change of the pool since.
            held: Pages that the caller holds a reference to each of; renamed, too.

        Raises:
            InvariantError: a page is held by somebody who cannot be told. Nothing has changed; nor
                has it when the mover raises.
        """
        holders = self._checked(moves, held)
        if moves and self.mover is not None:
            self.mover.move(moves)
        self._blocks.take_these(move.target for move in moves)
        self._rename(moves, holders)

    def pack(self, moves: Sequence[PageMove]) -> None:
        """Pack full pages into free ones that were taken for it; else as `move`."""
        holders = self._checked(moves, None)
        assert self.mover is not None
        self.mover.pack(moves)
        for move in moves:
            for _, _, sequence in holders[move.source]:
                if sequence is not None:
                    sequence.packed_pages += 1
        self._rename(moves, holders)

    def empty_blocks(self, packed: bool, count: int, held: list[PageId] | None = None) -> int:
        """Move pages of a format together, so that up to `count` blocks hold nothing.

        Args:
            held: See `move`.

        Returns:
            How many blocks.

        Raises:
            PoolExhausted: the copies could not be made. Nothing has changed.
        """
        moves = plan_emptying(self._blocks, self._movable(), packed, count)
        before = self._blocks.used_blocks
        if not moves:
            return 0
        try:
            self.move(moves, held)
        except InvariantError:
            raise
        except Exception as error:
            logger.exception("%d pages could not be moved together", len(moves))
            raise PoolExhausted(f"pages could not be moved together: {error}") from error
        return before - self._blocks.used_blocks

    def busy(self) -> set[PageId]:
        """Pages whose id is known outside: to copies between tiers, and copies on write."""
        busy = {move.transfer.page for move in self._residency.moves.values()}
        for sequence in self._sequences.values():
            for copy in sequence.copies:
                busy |= {copy.source, copy.target}
        return busy

    def holders(self, pages: Sequence[PageId], held: list[PageId] | None = None) -> Holders:
        """Who lists some pages, where. O(pages of all sequences)."""
        wanted = set(pages)
        holders: Holders = defaultdict(list)
        tables: list[tuple[list[PageId], PoolSequence | None]] = [(self._claimed.held, None)]
        tables += [(sequence.pages, sequence) for sequence in self._sequences.values()]
        if held is not None:
            tables.append((held, None))
        for table, sequence in tables:
            if not wanted.isdisjoint(table):
                for index, page in enumerate(table):
                    if page in wanted:
                        holders[page].append((table, index, sequence))
        return holders

    def _movable(self) -> Callable[[PageId], bool]:
        state, busy = self._pages.state, self.busy()
        return lambda page: state[page] in _MOVABLE and page not in busy

    def _checked(self, moves: Sequence[PageMove], held: list[PageId] | None) -> Holders:
        holders = self.holders([move.source for move in moves], held)
        for move in moves:
            if len(holders[move.source]) != self._pages.refs[move.source]:
                raise InvariantError(f"page {move.source} moved while somebody else holds it")
        return holders

    def _rename(self, moves: Sequence[PageMove], holders: Holders) -> None:
        for move in moves:
            self._pages.move(move.source, move.target)
            self._residency.renamed(move.source, move.target)
            for table, index, sequence in holders[move.source]:
                table[index] = move.target
                if sequence is not None:
                    sequence.rewritten.append(index)
        self._blocks.put(move.source for move in moves)
