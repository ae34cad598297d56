"""What passes through the pool's door: lookups, running sequences, copies."""

import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memd.pool.files import PageFile
from memd.pool.prefix_tree import Node
from memd.types import PageId, PrefixMiss, RequestId, Tier


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy on write: the first tokens of `source` go into `target` before the next forward."""

    source: PageId
    target: PageId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What a lookup found. Valid until the pool changes.

    `awaited`: a running sequence is about to write the page that would come next, so waiting for it
    spares computing it twice. `files`: pages on disk that continue `nodes`, at `end`; the tail is
    for when they do not come. `bounded`: it is for a sequence that may outgrow its budget.
    """

    nodes: list[Node]
    tail: PageId | None
    tail_tokens: int
    num_tokens: int
    awaited: bool
    epoch: int
    files: tuple[PageFile, ...] = ()
    end: Node | None = None
    bounded: bool = False

    @property
    def incomplete(self) -> bool:
        """Whether a part is not on the device."""
        return bool(self.files or self.missing)

    @property
    def missing(self) -> list[Node]:
        """The nodes whose page is not on the device."""
        return [node for node in self.nodes if node.page is None]

    def on_device(self, page_tokens: int) -> "PrefixMatch":
        """The part that can be used at once, up to the first page that is not on the device."""
        missing = self.missing
        if not missing:
            num_tokens = len(self.nodes) * page_tokens + self.tail_tokens
            return replace(self, num_tokens=num_tokens, files=()) if self.files else self
        return self.leading(self.nodes.index(missing[0]), page_tokens)

    def leading(self, num_pages: int, page_tokens: int) -> "PrefixMatch":
        """The part that is in the first pages; what would come next is not waited for."""
        num_tokens = num_pages * page_tokens
        nodes, bounded = self.nodes[:num_pages], self.bounded
        return PrefixMatch(nodes, None, 0, num_tokens, False, self.epoch, bounded=bounded)


@dataclass(slots=True, eq=False)
class PoolSequence:
    """One running sequence's pages.

    `tokens` is shared with the request and grows with it; pages cover it in order, but for
    `dropped_pages` that were let go, the first of them behind `whole_pages`. The first
    `sealed_pages` pages are in the tree, the last of them at `node`. `rewritten` holds indexes of
    `pages` whose entry has changed, or that are no more; whoever keeps a copy of the page table
    empties it. `bounded`: it may outgrow its budget. `shares` of attention are moving averages, of
    the leading pages; empty where they are not measured.
    """

    request_id: RequestId
    namespace: str
    tokens: "array[int]"
    pages: list[PageId]
    node: Node
    sealed_pages: int
    announced_pages: int  # prompt pages [sealed, announced) are announced to others as coming
    tenant: int = 0  # number of whom its pages are charged to
    copies: list[PageCopy] = field(default_factory=list)
    miss: PrefixMiss | None = None  # of its lookup, if that was counted
    restored_tokens: Mapping[Tier, int] = field(default_factory=dict)  # brought up for its start
    rewritten: list[int] = field(default_factory=list)
    dropped_pages: int = 0
    most_pages: int = 0  # held at once, before pages were let go
    packed_pages: int = 0  # of `pages`
    packing_start: int = 0  # pages before this one, of the whole sequence, need no packing any more
    packing_stop: int = 0  # and those before this one may be packed, as far as it is concerned
    whole_pages: int = sys.maxsize
    bounded: bool = False
    shares: list[float] = field(default_factory=list)

    def page_at(self, index: int) -> PageId | None:
        """The page at a position of the whole sequence; None if it was let go or is not there.

        Not with a budget, which lets pages go anywhere: what a window lets go is one run of them.
        """
        if index >= self.whole_pages:
            index -= self.dropped_pages
            if index < self.whole_pages:
                return None
        return self.pages[index] if index < len(self.pages) else None

    @property
    def span_pages(self) -> int:
        """Pages from the first to the last, with those let go between."""
        return self.dropped_pages + len(self.pages)


def copies_of(
    sources: list[PageId], targets: list[PageId], cached_tokens: int, page_tokens: int
) -> list[PageCopy]:
    """Copies of the last cached pages of a sequence into its first own ones, in order.

    The last source may be needed in part: the sequence has `cached_tokens` tokens, no more.
    """
    tail_tokens = cached_tokens % page_tokens or page_tokens
    counts = [page_tokens] * (len(sources) - 1) + [tail_tokens]
    return [PageCopy(*copy) for copy in zip(sources, targets, counts, strict=False)]
