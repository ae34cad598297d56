"""Blocks by how many free pages each has."""

from collections.abc import Iterator

from memd.types import BlockId


class Buckets:
    """Blocks with at least one free page, in buckets by their number. O(1) operations.

    Args:
        most_free: Free pages of a block that holds nothing.
    """

    def __init__(self, most_free: int) -> None:
        self._most_free = most_free
        self._blocks: list[dict[BlockId, None]] = [{} for _ in range(most_free + 1)]
        self._nonempty = 0  # bit n: some block has n free pages; n >= 1

    def fullest(self) -> BlockId | None:
        """A block with the fewest free pages; None: there is no free page."""
        if not self._nonempty:
            return None
        return self._last((self._nonempty & -self._nonempty).bit_length() - 1)

    def empty(self) -> BlockId | None:
        """A block that holds nothing, if there is one."""
        return self._last(self._most_free) if self._blocks[self._most_free] else None

    def move(self, block: BlockId, old_free: int, new_free: int) -> None:
        """A block has another number of free pages; 0: it is, or was, not here."""
        if old_free:
            bucket = self._blocks[old_free]
            del bucket[block]
            if not bucket:
                self._nonempty &= ~(1 << old_free)
        if new_free:
            self._blocks[new_free][block] = None
            self._nonempty |= 1 << new_free

    def partly_used(self, emptiest_first: bool) -> Iterator[BlockId]:
        """Blocks that hold something and have room, by how much. Not to be changed meanwhile."""
        order = range(1, self._most_free)
        for free in reversed(order) if emptiest_first else order:
            yield from self._blocks[free]

    def _last(self, free: int) -> BlockId:
        bucket = self._blocks[free]
        block, _ = bucket.popitem()
        bucket[block] = None  # popitem, unlike a look, keeps the end compact
        return block
