"""What passes through the pool's door: lookups, running sequences, copies."""

from array import array
from dataclasses import dataclass

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


@dataclass(slots=True, eq=False)
class PoolSequence:
    """One running sequence's pages.

    `tokens` is shared with the request and grows with it; pages cover it in order. The first
    `sealed_pages` pages are in the tree, the last of them at `node`.
    """

    request_id: RequestId
    namespace: str
    tokens: "array[int]"
    pages: list[PageId]
    node: Node
    sealed_pages: int
    announced_pages: int  # prompt pages [sealed, announced) are announced to others as coming
    copy: PageCopy | None = None
