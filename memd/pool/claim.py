"""Pages kept for the one waiting request whose turn it is, while the rest of its pages arrive."""

from collections.abc import Callable, Sequence

from memd.pool.blocks import Blocks
from memd.pool.pages import Pages
from memd.pool.prefix_tree import Node
from memd.types import PageId


class Claim:
    """References held for a request that does not run yet. There is one claim in a pool, so that
    claims never keep each other's requests from starting.

    Args:
        pages, blocks: Of the pool.
        clock: Monotonic seconds.
    """

    def __init__(self, pages: Pages, blocks: Blocks, clock: Callable[[], float]) -> None:
        self.held: list[PageId] = []
        self._pages = pages
        self._blocks = blocks
        self._clock = clock

    def extend(self, nodes: Sequence[Node]) -> None:
        """Hold what has arrived of a prefix.

        Args:
            nodes: The prefix from its beginning, up to the first page that is not on the device.
        """
        new = [node.page for node in nodes[len(self.held) :] if node.page is not None]
        self._pages.hold(new)
        self.held += new

    def refresh(self, pages: list[PageId]) -> None:
        """Have cached pages, in the order of their prefix, go after all others."""
        self._pages.hold(pages)
        self._blocks.put(self._pages.drop(pages[::-1], self._clock()))

    def release(self) -> None:
        """Let everything go."""
        held, self.held = self.held, []
        self._blocks.put(self._pages.drop(held[::-1], self._clock()))
