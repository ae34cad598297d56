"""Gives the content of pages other page ids, everywhere they are known, in one place."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from memd.errors import InvariantError
from memd.pool.blocks import Blocks
from memd.pool.claim import Claim
from memd.pool.defrag import PageMove, plan_moves
from memd.pool.pages import Pages, PageState
from memd.pool.residency import Residency
from memd.pool.sequence import PoolSequence
from memd.types import PageId, RequestId

_MOVABLE = (PageState.WRITING, PageState.SEALED)
Holders = dict[PageId, list[tuple[PoolSequence, int]]]  # by page: sequence, index in its table


class Relocator:
    """Knows who refers to a page by its id, and tells all of them when it changes.

    Args:
        pages, blocks, residency, claimed: Of one pool.
        sequences: Of the same pool, by request.
    """

    def __init__(
        self,
        pages: Pages,
        blocks: Blocks,
        residency: Residency,
        claimed: Claim,
        sequences: Mapping[RequestId, PoolSequence],
    ) -> None:
        self._pages = pages
        self._blocks = blocks
        self._residency = residency
        self._claimed = claimed
        self._sequences = sequences

    def plan(self, max_pages: int) -> list[PageMove]:
        """Moves that may be made now: their sources are nobody's but the tree's and sequences'."""
        state, refs, busy = self._pages.state, self._pages.refs, self._busy()
        moves = plan_moves(
            self._blocks, lambda page: state[page] in _MOVABLE and page not in busy, max_pages
        )
        holders = self._holders(moves)
        return [move for move in moves if len(holders[move.source]) == refs[move.source]]

    def apply(self, moves: Sequence[PageMove]) -> None:
        """The bytes of each source are at its target, or will be before anything reads them there.

        State, references, pins, owner, place in the tree and in the eviction order go along, and
        the tables of all sequences are rewritten. Sources are free after it: as the device works
        in order, whoever writes them next comes after the copy.

        Args:
            moves: From `plan`, with no change of the pool since.

        Raises:
            InvariantError: a page is held by somebody who cannot be told. Nothing has changed.
        """
        holders = self._holders(moves)
        for move in moves:
            if len(holders[move.source]) != self._pages.refs[move.source]:
                raise InvariantError(f"page {move.source} moved while somebody else holds it")
        self._blocks.take_these(move.target for move in moves)
        for move in moves:
            self._pages.move(move.source, move.target)
            self._residency.renamed(move.source, move.target)
            for sequence, index in holders[move.source]:
                sequence.pages[index] = move.target
                sequence.rewritten.append(index)
        self._blocks.put(move.source for move in moves)

    def _busy(self) -> set[PageId]:
        """Pages whose id is known outside: to copies between tiers, copies on write, the claim."""
        busy = {move.transfer.page for move in self._residency.moves.values()}
        busy.update(self._claimed.held)
        for sequence in self._sequences.values():
            for copy in sequence.copies:
                busy |= {copy.source, copy.target}
        return busy

    def _holders(self, moves: Sequence[PageMove]) -> Holders:
        sources = {move.source for move in moves}
        holders: Holders = defaultdict(list)
        for sequence in self._sequences.values():
            if not sources.isdisjoint(sequence.pages):
                for index, page in enumerate(sequence.pages):
                    if page in sources:
                        holders[page].append((sequence, index))
        return holders
