"""Which pages a sequence lets go of when it has its full budget of them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from memd.types import DropPolicy


@dataclass(frozen=True)
class Budget:
    """Most pages that a sequence holds, and which go first.

    The first pages stay for ever, and of the others the later half, as the most recent. A text is
    computed whole until it fills the budget; from there on in segments: room is made for a segment
    at its beginning, and no step crosses its end. So what a token sees does not depend on how many
    are computed at once.

    Args:
        pages: At least two more than `sink_pages`.
        sink_pages: Leading pages that stay.
        policy: What goes of those between: the oldest, by segments; or while a sequence decodes
            what has the least share of its attention, page by page (the oldest as long as no share
            is known, so while a prompt is computed).
        page_tokens: Tokens of a page.

    Raises:
        ValueError: there are too few pages.

    Source:
        Half of the heaviest and half of the most recent, at their original positions: H2O (Zhang
        et al., arXiv 2306.14048, section 4); by tokens and heads there, by pages here.
    """

    pages: int
    sink_pages: int
    policy: DropPolicy
    page_tokens: int

    def __post_init__(self) -> None:
        if self.pages < self.sink_pages + 2:
            raise ValueError(
                f"a budget of {self.pages} pages of {self.page_tokens} tokens leaves no room "
                f"beside {self.sink_pages} for the first tokens: it needs "
                f"{(self.sink_pages + 2) * self.page_tokens} tokens or more"
            )

    @property
    def tokens(self) -> int:
        """Longest text that is kept whole."""
        return self.pages * self.page_tokens

    @property
    def segment_pages(self) -> int:
        """Pages that are made free, and then computed, at once."""
        return max(1, (self.pages - self.sink_pages) // 4)

    @property
    def recent_pages(self) -> int:
        """Latest pages that do not go."""
        return (self.pages - self.sink_pages) // 2

    def chunk_tokens(self, num_computed: int) -> int:
        """Tokens from a position to where pages may have to go."""
        if num_computed < self.tokens:
            return self.tokens - num_computed
        segment_tokens = self.segment_pages * self.page_tokens
        return segment_tokens - (num_computed - self.tokens) % segment_tokens

    def victims(self, num_pages: int, wanted: int, shares: Sequence[float]) -> list[int]:
        """Indices of the pages to let go of, ascending.

        Args:
            num_pages: That are held, of which the leading ones are sinks.
            wanted: That are to come.
            shares: Of attention, of the leading pages; of later ones it is not known yet.
        """
        surplus = num_pages + wanted - self.pages
        if surplus <= 0:
            return []
        known = min(len(shares), num_pages - self.recent_pages)
        if self.policy == "recency" or known < self.sink_pages + surplus:
            return list(range(self.sink_pages, self.sink_pages + max(surplus, self.segment_pages)))
        lightest = sorted(range(self.sink_pages, known), key=lambda index: shares[index])
        return sorted(lightest[:surplus])
