"""What passes through the pool's door: lookups, running sequences, copies."""

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
    for when they do not come.
    """

    nodes: list[Node]
    tail: PageId | None
    tail_tokens: int
    num_tokens: int
    awaited: bool
    epoch: int
    files: tuple[PageFile, ...] = ()
    end: Node | None = None

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
        nodes = self.nodes[: self.nodes.index(missing[0])]
        return PrefixMatch(nodes, None, 0, len(nodes) * page_tokens, self.awaited, self.epoch)


@dataclass(slots=True, eq=False)
class PoolSequence:
    """One running sequence's pages.

    `tokens` is shared with the request and grows with it; pages cover it in order, but for
    `dropped_pages` behind the sinks that a window has passed. The first `sealed_pages` pages are in
    the tree, the last of them at `node`. `rewritten` holds indexes of `pages` whose entry has
    changed, or that are no more; whoever keeps a copy of the page table empties it.
    """

    request_id: RequestId
    namespace: str
    tokens: "array[int]"
    pages: list[PageId]
    node: Node
    sealed_pages: int
    announced_pages: int  # prompt pages [sealed, announced) are announced to others as coming
    tenant: int = 0  # number of whom its pages are charged to
    copy: PageCopy | None = None
    miss: PrefixMiss | None = None  # of its lookup, if that was counted
    restored_tokens: Mapping[Tier, int] = field(default_factory=dict)  # brought up for its start
    rewritten: list[int] = field(default_factory=list)
    dropped_pages: int = 0
    first_dropped: int = 0  # index of the first of them, in the whole sequence
    most_pages: int = 0  # held at once, before pages were let go
    packed_pages: int = 0  # of `pages`
    packing_start: int = 0  # pages before this one, of the whole sequence, need no packing any more
    packing_stop: int = 0  # and those before this one may be packed, as far as it is concerned

    def page_at(self, index: int) -> PageId | None:
        """The page at a position of the whole sequence; None if it was let go or is not there."""
        if not self.dropped_pages or index < self.first_dropped:
            return self.pages[index] if index < len(self.pages) else None
        index -= self.dropped_pages
        return self.pages[index] if self.first_dropped <= index < len(self.pages) else None

    @property
    def span_pages(self) -> int:
        """Pages from the first to the last, with those let go between."""
        return self.dropped_pages + len(self.pages)
