"""What passes through the pool's door: lookups, running sequences, copies."""

from array import array
from dataclasses import dataclass, field

from memd.pool.prefix_tree import Node
from memd.types import PageId, RequestId


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
    spares computing it twice.
    """

    nodes: list[Node]
    tail: PageId | None
    tail_tokens: int
    num_tokens: int
    awaited: bool
    epoch: int

    @property
    def missing(self) -> list[Node]:
        """The nodes whose page is not on the device."""
        return [node for node in self.nodes if node.page is None]

    def on_device(self, page_tokens: int) -> "PrefixMatch":
        """The part that can be used at once, up to the first page that is not on the device."""
        missing = self.missing
        if not missing:
            return self
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
    restored_tokens: int = 0  # of those cached at its start: brought up from the host for it
    rewritten: list[int] = field(default_factory=list)
    dropped_pages: int = 0
    most_pages: int = 0  # held at once, before pages were let go

    @property
    def span_pages(self) -> int:
        """Pages from the first to the last, with those let go between."""
        return self.dropped_pages + len(self.pages)
