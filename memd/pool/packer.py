"""Packs pages of running sequences: the same content, under another id, in another format."""

import logging
from collections.abc import Sequence

from memd.errors import InvariantError, OutOfDeviceMemory, PoolExhausted
from memd.pool.allocator import Allocator
from memd.pool.blocks import Blocks
from memd.pool.counters import PoolCounters
from memd.pool.defrag import PageMove
from memd.pool.disk import DiskTier
from memd.pool.pages import Pages, PageState
from memd.pool.relocate import Holders, Relocator
from memd.pool.retention import Retention
from memd.pool.sequence import PoolSequence
from memd.types import PageId

logger = logging.getLogger(__name__)


class Packer:
    """Packs what `Retention.packing` names, as far as it may and as there is room.

    Args:
        relocator, allocator, retention, pages, blocks, disk, counters: Of one pool.
    """

    def __init__(
        self,
        relocator: Relocator,
        allocator: Allocator,
        retention: Retention,
        pages: Pages,
        blocks: Blocks,
        disk: DiskTier,
        counters: PoolCounters,
    ) -> None:
        self._relocator = relocator
        self._allocator = allocator
        self._retention = retention
        self._pages = pages
        self._blocks = blocks
        self._disk = disk
        self._counters = counters

    def pack(self, sequence: PoolSequence, num_tokens: int) -> int:
        """Pack what the schedule names of a sequence at a length, as far as may be now.

        To be called before the next token is computed, whenever the length has crossed a multiple
        of `packing_step_tokens`. O(1) if nothing is due that was not packed before. What is not in
        the tree yet, is being copied, or is held by somebody who may not see it packed yet is tried
        again the next time, as is what there is no room for.

        Args:
            num_tokens: All of them computed, or to be computed by steps launched so far.

        Returns:
            How many pages were packed. All that hold them have them in `rewritten`.
        """
        schedule = self._retention.packing
        if schedule is None:
            return 0
        due = schedule.packed_pages(num_tokens)
        stop = min(due.stop, sequence.span_pages)
        sequence.packing_stop = max(sequence.packing_stop, stop)
        sequence.packing_start = max(sequence.packing_start, due.start)
        sources = self._due(sequence, stop)
        if not sources:
            return 0
        try:
            room = self._allocator.make_packed_room(len(sources))
        except PoolExhausted:
            room = self._blocks.obtainable_packed_pages
        # Making room may have moved pages: the table tells where they are now.
        sources = self._due(sequence, stop)
        targets = self._take(min(room, len(sources)))
        self._counters.packing_no_room += len(sources) - len(targets)
        moves = [PageMove(*pair, packed=True) for pair in zip(sources, targets, strict=False)]
        if moves and self._carry_out(moves):
            self._advance(sequence, stop)
            return len(moves)
        return 0

    def _take(self, count: int) -> list[PageId]:
        """Up to so many packed pages: those that have memory, when the device has no more."""
        try:
            return self._blocks.take_packed(count)
        except OutOfDeviceMemory:
            return self._blocks.take_packed(min(count, self._blocks.free_packed_pages))

    def _carry_out(self, moves: Sequence[PageMove]) -> bool:
        try:
            self._relocator.pack(moves)
        except InvariantError:
            raise
        except Exception:
            logger.exception("%d pages could not be packed", len(moves))
            self._blocks.put(move.target for move in moves)
            self._counters.packing_failed += len(moves)
            return False
        self._counters.packed += len(moves)
        for move in moves:
            node = self._pages.node[move.target]
            if node is not None:
                self._disk.repacked(node)
        return True

    def _advance(self, sequence: PoolSequence, stop: int) -> None:
        """Remember from where on to look the next time."""
        while sequence.packing_start < stop:
            page = sequence.page_at(sequence.packing_start)
            if page is not None and not self._blocks.is_packed(page):
                return
            sequence.packing_start += 1

    def _due(self, sequence: PoolSequence, stop: int) -> list[PageId]:
        """Full pages of a sequence before an index that may be packed now, in order."""
        self._advance(sequence, stop)
        state, tokens, refs = self._pages.state, self._pages.tokens, self._pages.refs
        found: list[tuple[int, PageId]] = []
        for index in range(sequence.packing_start, stop):
            page = sequence.page_at(index)
            if page is None or self._blocks.is_packed(page):
                continue
            if state[page] == PageState.SEALED and tokens[page] == self._pages.page_tokens:
                found.append((index, page))
        if not found:
            return []
        busy = self._relocator.busy()
        found = [each for each in found if each[1] not in busy]
        shared = [page for _, page in found if refs[page] > 1]
        holders = self._relocator.holders(shared) if shared else {}
        return [
            page
            for index, page in found
            if refs[page] == 1 or self._all_agree(holders, page, index)
        ]

    def _all_agree(self, holders: Holders, page: PageId, index: int) -> bool:
        """Whether everybody who holds a page may have it packed."""
        held = [sequence for _, _, sequence in holders[page]]
        if len(held) < self._pages.refs[page]:
            return False
        return all(sequence is not None and index < sequence.packing_stop for sequence in held)
