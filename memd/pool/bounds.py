"""How many pages a sequence needs, by what bounds it. Pure; used by the pool and by `memd plan`."""

import sys

from memd.pool.budget import Budget
from memd.pool.layout import KVLayout
from memd.pool.packing import PackingSchedule

LEAST_CHUNK_TOKENS = 64  # a prompt is not cut finer than this, however narrow the window
UNLIMITED = sys.maxsize


class SequenceBounds:
    """Arithmetic of a window, or of a budget, or of neither; see `memd.pool.retention`.

    Args:
        layout: Of the pages.
        window: Tokens; None: everything is seen.
        sinks: Tokens.
        budget: None: without one. Not together with a window.
        packing: Which pages of a sequence are packed; None: none. Not together with a budget.
    """

    def __init__(
        self,
        layout: KVLayout,
        window: int | None = None,
        sinks: int = 0,
        budget: Budget | None = None,
        packing: PackingSchedule | None = None,
    ) -> None:
        self.layout = layout
        self.window = window
        self.sinks = sinks
        self.budget = budget
        self.packing = packing

    @property
    def sink_pages(self) -> int:
        """Leading pages that are seen for ever."""
        return self.layout.pages_for(self.sinks)

    def shared_pages(self, bounded: bool = False) -> int:
        """Leading pages that a running sequence may share with others.

        Args:
            bounded: It may outgrow its budget.
        """
        if bounded:
            return self.sink_pages
        if self.window is None:
            return UNLIMITED
        return self.layout.pages_for(self.sinks + self.window)

    def usable_tokens(self, longest_tokens: int) -> tuple[int, bool]:
        """Most cached tokens that a sequence can begin with, and whether it may outgrow its budget.

        What a budget holds is left with a page to compute: the rest of the text finds no room yet.

        Args:
            longest_tokens: Length that it may reach.
        """
        if self.budget is None or longest_tokens <= self.budget.tokens:
            return UNLIMITED, False
        return self.budget.tokens - self.layout.page_tokens, True

    def chunk_tokens(self, num_computed: int) -> int:
        """Most tokens of a prompt computed in one step, which bounds the pages it needs at once.

        Args:
            num_computed: Tokens before them.
        """
        if self.budget is not None:
            return self.budget.chunk_tokens(num_computed)
        return UNLIMITED if self.window is None else max(self.window, LEAST_CHUNK_TOKENS)

    def first_pages(self, num_tokens: int, cached_tokens: int) -> int:
        """Pages of a sequence of `num_tokens` tokens when it starts: cached ones and a chunk."""
        first_tokens = cached_tokens + self.chunk_tokens(cached_tokens)
        return self.layout.pages_for(min(num_tokens, first_tokens))

    def peak_pages(self, num_tokens: int) -> int:
        """Most pages that a sequence holds at once until it has `num_tokens` tokens.

        Behind a window they are full ones, but for the first block that it opens for packed ones.
        """
        pages = self.layout.pages_for(num_tokens)
        if self.budget is not None:
            return min(pages, self.budget.pages)
        if self.window is None:
            return pages
        most = self.layout.pages_for(self.window + self.chunk_tokens(0))
        opened = 0 if self.packing is None else self.layout.pages_per_block
        return min(pages, self.shared_pages() + most) + opened
