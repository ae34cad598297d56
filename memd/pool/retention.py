"""Pages that a sliding window has passed: which they are, and how a sequence lets go of them."""

import sys
from collections.abc import Callable

from memd.pool.announcements import Announcements
from memd.pool.blocks import Blocks
from memd.pool.counters import PoolCounters
from memd.pool.layout import KVLayout
from memd.pool.pages import Pages
from memd.pool.prefix_tree import PrefixTree
from memd.pool.sequence import PoolSequence

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

    Attributes:
        window: Tokens; None: everything is seen.
        sinks: Tokens.

    Args:
        layout, pages, blocks, tree, announced, counters: Of one pool.
        clock: Monotonic seconds.
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
    ) -> None:
        self.window: int | None = None
        self.sinks = 0
        self._layout = layout
        self._pages = pages
        self._blocks = blocks
        self._tree = tree
        self._announced = announced
        self._counters = counters
        self._clock = clock

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
        return UNLIMITED if self.window is None else max(self.window, LEAST_CHUNK_TOKENS)

    def publishable_pages(self, sequence: PoolSequence) -> int:
        """Leading pages of a sequence that may be in the tree."""
        return self.sink_pages if sequence.dropped_pages else self.shared_pages

    def first_pages(self, num_tokens: int, cached_tokens: int) -> int:
        """Pages of a sequence of `num_tokens` tokens when it starts: cached ones and a chunk."""
        return self._layout.pages_for(min(num_tokens, cached_tokens + self.chunk_tokens))

    def peak_pages(self, num_tokens: int) -> int:
        """Most pages that a sequence holds at once until it has `num_tokens` tokens."""
        pages = self._layout.pages_for(num_tokens)
        if self.window is None:
            return pages
        most = self._layout.pages_for(self.window + self.chunk_tokens)
        return min(pages, self.shared_pages + most)

    def outstanding_pages(self, sequence: PoolSequence, num_tokens: int) -> int:
        """Pages that a running sequence will hold at most, beyond those it has."""
        most = self.peak_pages(num_tokens)
        if self.window is not None and sequence.dropped_pages:
            covered = sequence.span_pages * self._layout.page_tokens >= len(sequence.tokens)
            chunk = 0 if covered else self.chunk_tokens
            most = self.sink_pages + self._layout.pages_for(self.window + chunk) + 1
            most = min(most, self._layout.pages_for(num_tokens) - sequence.dropped_pages)
        return max(0, most - len(sequence.pages))

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
        self._counters.dropped["recency"] += count
        self._blocks.put(self._pages.drop(gone[::-1], self._clock()))
