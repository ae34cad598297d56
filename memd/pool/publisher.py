"""Offers written pages to the prefix tree."""

from memd.pool.announcements import Announcements
from memd.pool.blocks import Blocks
from memd.pool.disk import DiskTier
from memd.pool.pages import Pages
from memd.pool.prefix_tree import PrefixTree
from memd.pool.residency import Residency
from memd.pool.sequence import PoolSequence
from memd.types import PageId


class Publisher:
    """Puts pages into the tree, one page for each content.

    Args:
        tree, pages, blocks, residency, disk: Of one pool.
    """

    def __init__(
        self,
        tree: PrefixTree,
        pages: Pages,
        blocks: Blocks,
        residency: Residency,
        disk: DiskTier,
    ) -> None:
        self._tree = tree
        self._pages = pages
        self._blocks = blocks
        self._residency = residency
        self._disk = disk

    def publish(self, sequence: PoolSequence, last: int, announced: Announcements) -> list[PageId]:
        """Offer the full pages of a sequence that come after its sealed ones, up to an index.

        Returns:
            Its own pages, for which it has taken others; still held.
        """
        first, size = sequence.sealed_pages, self._tree.page_bytes
        page_tokens = self._tree.page_tokens
        data = sequence.tokens[first * page_tokens : last * page_tokens].tobytes()
        replaced: list[PageId] = []
        for index in range(first, last):
            start = (index - first) * size
            own = sequence.pages[index]
            canonical = self.seal(sequence, own, data[start : start + size])
            if canonical != own:
                sequence.pages[index] = canonical
                sequence.rewritten.append(index)
                sequence.packed_pages += self._blocks.is_packed(canonical)
                replaced.append(own)
            if index < sequence.announced_pages:
                announced.withdraw(sequence.node.key)
        sequence.sealed_pages = last
        self._disk.computed(sequence.node, last * page_tokens, last - first)
        return replaced

    def seal(self, sequence: PoolSequence, page: PageId, data: bytes) -> PageId:
        """Offer a page of a sequence to the tree, after those of it that are there.

        Args:
            data: The tokens in the page, as the tree's labels have them.

        Returns:
            The page that now stands for these tokens. If it is another one, it is held as well.
        """
        node, superseded = self._tree.insert(sequence.node, data, page)
        if superseded is not None and self._pages.detach(superseded):
            self._blocks.put([superseded])
        if node is None:
            return page
        full = len(data) == self._tree.page_bytes
        if node.page is None:
            self._residency.adopt(node, page)
        canonical = node.page if node.page is not None else page
        if canonical == page:
            self._pages.seal(page, node)
        elif full:
            self._pages.hold([canonical])
            self._residency.restored.overtaken(canonical)
        if full:
            sequence.node = node
        return canonical
