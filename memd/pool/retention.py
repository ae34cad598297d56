"""Pages that a running sequence keeps no longer: which they are, and how it lets go of them."""

from collections.abc import Callable

from memd.pool.announcements import Announcements
from memd.pool.blocks import Blocks
from memd.pool.bounds import SequenceBounds
from memd.pool.counters import PoolCounters
from memd.pool.layout import KVLayout
from memd.pool.need import PackedNeed, packed_chunk_tokens
from memd.pool.pages import Pages
from memd.pool.prefix_tree import PrefixTree
from memd.pool.sequence import PoolSequence, PrefixMatch
from memd.types import DropPolicy


class Retention(SequenceBounds):
    """Bounds what a sequence holds: to what its later tokens can see, or to a budget.

    With a window a token sees the first `sinks` tokens and the last `window`, itself included. The
    leading `shared_pages` pages of a sequence are published and held like all others, until the
    window has passed the last of them: only what begins at the root of the tree can be held. Then
    those behind the sinks are let go together and stay cached for others. All later pages are the
    sequence's own and never published; each is freed as soon as the window has passed it.

    With a budget a sequence that may outgrow it shares its sinks alone. Its other pages are its
    own, those that were cached are copied for it: so any of them can be let go, and no text depends
    on who else holds them. When it ends, what stands before the first page that was let go is
    published. Sequences that cannot outgrow the budget are kept whole and share everything.

    With neither all is kept and published, and nothing is bounded.

    Where pages are packed, a prompt is computed in chunks, so that a sequence needs no more full
    pages at once than are not packed yet. Pages that are not published stay full. With a budget
    none is packed.

    Args:
        layout, pages, blocks, tree, announced, counters: Of one pool.
        clock: Monotonic seconds.
        pool_pages: Tells how many full pages the pool may hold.
    """

    def __init__(
        self,
        layout: KVLayout,
        pages: Pages,
        blocks: Blocks,
        tree: PrefixTree,
        announced: Announcements,
        counters: PoolCounters,
        clock: Callable[[], float],
        pool_pages: Callable[[], int],
    ) -> None:
        super().__init__(layout)
        self._pages = pages
        self._blocks = blocks
        self._tree = tree
        self._announced = announced
        self._counters = counters
        self._clock = clock
        self._pool_pages = pool_pages

    @property
    def packed_need(self) -> PackedNeed | None:
        """What a sequence needs, where its pages are packed and no window bounds it."""
        if self.packing is None or self.window is not None:
            return None
        pool_tokens = self._pool_pages() * self.layout.page_tokens
        chunk_tokens = packed_chunk_tokens(self.packing, pool_tokens)
        return PackedNeed(self.layout, self.packing, chunk_tokens)

    @property
    def measures_shares(self) -> bool:
        """Whether the pages' shares of attention are wanted."""
        return self.budget is not None and self.budget.policy == "attention_share"

    def chunk_tokens(self, num_computed: int) -> int:
        """See `SequenceBounds`; where pages are packed, those of a chunk are full till the next."""
        need = self.packed_need
        return super().chunk_tokens(num_computed) if need is None else need.chunk_tokens

    def peak_pages(self, num_tokens: int) -> int:
        """Most full pages that a sequence takes at once until it has `num_tokens` tokens."""
        need = self.packed_need
        return super().peak_pages(num_tokens) if need is None else need.peak_pages(num_tokens)

    def most_listed_pages(self, num_tokens: int) -> int:
        """Most pages, of either format, in the table of a sequence of so many tokens."""
        return super().peak_pages(num_tokens)

    def publishable_pages(self, sequence: PoolSequence) -> int:
        """Leading pages of a sequence that may be in the tree."""
        return min(self.shared_pages(sequence.bounded), sequence.whole_pages)

    def held_pages(self, match: PrefixMatch) -> int:
        """Pages of a match that its sequence holds, once they are all on the device; others are
        copied for it.
        """
        return min(len(match.nodes), self.shared_pages(match.bounded))

    def reserve_pages(
        self, num_tokens: int, cached: PrefixMatch, cached_packed_pages: int, most_tokens: int
    ) -> int:
        """Most full pages that a sequence takes after its start, beyond those of its start.

        Args:
            num_tokens: Its length.
            cached: What it holds at its start.
            cached_packed_pages: The packed ones of those pages.
            most_tokens: What it will have at most.
        """
        first, need = self.first_pages(num_tokens, cached.num_tokens), self.packed_need
        if need is None:
            return self.peak_pages(most_tokens) - first
        held = len(cached.nodes)
        further = need.further_pages(held, cached_packed_pages, most_tokens)
        return max(0, further - (first - held))

    def outstanding_pages(self, sequence: PoolSequence, num_tokens: int) -> int:
        """Pages that a running sequence will hold at most, beyond those it has."""
        need, held = self.packed_need, len(sequence.pages)
        if need is not None:
            return need.further_pages(held, sequence.packed_pages, num_tokens)
        most = self.peak_pages(num_tokens)
        if sequence.dropped_pages:
            if self.window is not None:
                covered = sequence.span_pages * self.layout.page_tokens >= len(sequence.tokens)
                chunk = 0 if covered else self.chunk_tokens(0)
                most = self.sink_pages + self.layout.pages_for(self.window + chunk) + 1
            most = min(most, self.layout.pages_for(num_tokens) - sequence.dropped_pages)
        return max(0, most - held)

    def let_go(self, sequence: PoolSequence, num_computed: int, num_tokens: int) -> None:
        """Let go of the pages that a sequence may not keep when it grows.

        Args:
            num_computed: Tokens whose KV is in the pages.
            num_tokens: What pages are needed for.
        """
        if self.budget is not None:
            wanted = self.layout.pages_for(num_tokens) - sequence.span_pages
            victims = self.budget.victims(len(sequence.pages), wanted, sequence.shares)
            self._remove(sequence, victims, self.budget.policy)
        elif self.window is not None:
            passed = (num_computed + 1 - self.window) // self.layout.page_tokens
            kept = self.sink_pages
            if passed >= self.shared_pages():
                victims = list(range(kept, passed - sequence.dropped_pages))
                self._remove(sequence, victims, "recency")

    def _remove(self, sequence: PoolSequence, victims: list[int], policy: DropPolicy) -> None:
        """Take pages, by ascending index, out of a sequence's table."""
        if not victims:
            return
        first = victims[0]
        if first < sequence.whole_pages:
            self._announced.withdraw_rest(sequence)
            while sequence.sealed_pages > first:
                sequence.node = self._tree.page_parent(sequence.node)
                sequence.sealed_pages -= 1
            sequence.announced_pages = sequence.sealed_pages
            sequence.whole_pages = first
        sequence.most_pages = max(sequence.most_pages, len(sequence.pages))
        sequence.rewritten += range(first, len(sequence.pages))
        gone = [sequence.pages[index] for index in reversed(victims)]
        for index in reversed(victims):
            del sequence.pages[index]
            del sequence.shares[index : index + 1]
        sequence.dropped_pages += len(victims)
        sequence.packed_pages -= self._blocks.count_packed(gone)
        self._counters.dropped[policy] += len(victims)
        self._blocks.put(self._pages.drop(gone, self._clock()))
