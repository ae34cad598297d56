"""Pages that a sliding window has passed: which they are, and how a sequence lets go of them."""

import sys
from collections.abc import Callable

from memd.pool.announcements import Announcements
from memd.pool.blocks import Blocks
from memd.pool.counters import PoolCounters
from memd.pool.layout import KVLayout
from memd.pool.need import PackedNeed, packed_chunk_tokens
from memd.pool.packing import PackingSchedule
from memd.pool.pages import Pages
from memd.pool.prefix_tree import PrefixTree
from memd.pool.sequence import PoolSequence, PrefixMatch

LEAST_CHUNK_TOKENS = 64  # a prompt is not cut finer than this, however narrow the window
UNLIMITED = sys.maxsize


class Retention:
    """Bounds what a sequence holds to what its later tokens can see.

    A token sees the first `sinks` tokens and the last `window`, itself included. The leading
    `shared_pages` pages of a sequence are published and held like all others, until the window has
    passed the last of them: only what begins at the root of the tree can be held. Then those behind
    the sinks are let go together and stay cached for others. All later pages are the sequence's own
    and never published; each is freed as soon as the window has passed it.

    Without a window all is kept and published, and nothing is bounded.

    Where pages are packed, a prompt is computed in chunks, so that a sequence needs no more full
    pages at once than are not packed yet. Pages that are not published stay full.

    Attributes:
        packing: Which pages of a sequence are packed; None: none.
        window: Tokens; None: everything is seen.
        sinks: Tokens.

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
        self.packing: PackingSchedule | None = None
        self.window: int | None = None
        self.sinks = 0
        self._layout = layout
        self._pages = pages
        self._blocks = blocks
        self._tree = tree
        self._announced = announced
        self._counters = counters
        self._clock = clock
        self._pool_pages = pool_pages

    @property
    def sink_pages(self) -> int:
        """Leading pages that are seen for ever."""
        return self._layout.pages_for(self.sinks)

    @property
    def shared_pages(self) -> int:
        """Leading pages that a sequence may share with others."""
        if self.window is None:
            return UNLIMITED
        return self._layout.pages_for(self.sinks + self.window)

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of a prompt computed in one step: what bounds the pages it needs at once."""
        if self.window is not None:
            return max(self.window, LEAST_CHUNK_TOKENS)
        need = self.packed_need
        return UNLIMITED if need is None else need.chunk_tokens

    @property
    def packed_need(self) -> PackedNeed | None:
        """What a sequence needs, where its pages are packed and no window bounds it."""
        if self.packing is None or self.window is not None:
            return None
        pool_tokens = self._pool_pages() * self._layout.page_tokens
        chunk_tokens = packed_chunk_tokens(self.packing, pool_tokens)
        return PackedNeed(self._layout, self.packing, chunk_tokens)

    def publishable_pages(self, sequence: PoolSequence) -> int:
        """Leading pages of a sequence that may be in the tree."""
        return self.sink_pages if sequence.dropped_pages else self.shared_pages

    def first_pages(self, num_tokens: int, cached_tokens: int) -> int:
        """Pages of a sequence of `num_tokens` tokens when it starts: cached ones and a chunk."""
        return self._layout.pages_for(min(num_tokens, cached_tokens + self.chunk_tokens))

    def peak_pages(self, num_tokens: int) -> int:
        """Most full pages that a sequence takes at once until it has `num_tokens` tokens."""
        need = self.packed_need
        if need is not None:
            return need.peak_pages(num_tokens)
        pages = self._layout.pages_for(num_tokens)
        if self.window is None:
            return pages
        most = self._layout.pages_for(self.window + self.chunk_tokens)
        return min(pages, self.shared_pages + most) + self._opened_pages

    def most_listed_pages(self, num_tokens: int) -> int:
        """Most pages, of either format, in the table of a sequence of so many tokens."""
        if self.window is None:
            return self._layout.pages_for(num_tokens)
        return self.peak_pages(num_tokens)

    @property
    def _opened_pages(self) -> int:
        """What the first packed page of a sequence takes more than a full one, within a window."""
        return 0 if self.packing is None else self._layout.pages_per_block

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
        if self.window is not None and sequence.dropped_pages:
            covered = sequence.span_pages * self._layout.page_tokens >= len(sequence.tokens)
            chunk = 0 if covered else self.chunk_tokens
            most = self.sink_pages + self._layout.pages_for(self.window + chunk) + 1
            most = min(most, self._layout.pages_for(num_tokens) - sequence.dropped_pages)
        return max(0, most - held)

    def let_go(self, sequence: PoolSequence, num_computed: int) -> None:
        """Let go of the pages that no token from position `num_computed` on can see."""
        if self.window is None:
            return
        passed = (num_computed + 1 - self.window) // self._layout.page_tokens
        kept = self.sink_pages
        count = passed - kept - sequence.dropped_pages
        if passed < self.shared_pages or count <= 0:
            return
        if not sequence.dropped_pages:
            self._announced.withdraw_rest(sequence)
            while sequence.sealed_pages > kept:
                sequence.node = self._tree.page_parent(sequence.node)
                sequence.sealed_pages -= 1
            sequence.announced_pages = sequence.sealed_pages
        sequence.most_pages = max(sequence.most_pages, len(sequence.pages))
        sequence.rewritten += range(kept, len(sequence.pages))
        gone = sequence.pages[kept : kept + count]
        del sequence.pages[kept : kept + count]
        sequence.dropped_pages += count
        sequence.first_dropped = kept
        sequence.packed_pages -= self._blocks.count_packed(gone)
        self._counters.dropped["recency"] += count
        self._blocks.put(self._pages.drop(gone[::-1], self._clock()))
