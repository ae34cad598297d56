"""Places for pages in host memory: which are free, which page each holds, which goes first."""

from collections import OrderedDict

from memd.pool.prefix_tree import Node
from memd.types import SlotId


class HostSlots:
    """Slots of one page each, least recently written or read first to go. O(1) operations.

    A slot that a copy reads or writes is pinned: it keeps its page until the copy has ended.

    Args:
        capacity: Most slots in use; 0: no host tier. May be set while running; what exceeds a lower
            one is for the caller to evict.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._never_used = 0
        self._free: list[SlotId] = []
        self._pinned: dict[SlotId, Node] = {}
        self._unpinned: OrderedDict[SlotId, Node] = OrderedDict()

    @property
    def used(self) -> int:
        return len(self._pinned) + len(self._unpinned)

    @property
    def pinned(self) -> int:
        return len(self._pinned)

    def holders(self) -> dict[SlotId, Node]:
        """The node of each slot in use. O(n); for the audit."""
        return {**self._pinned, **self._unpinned}

    def take(self, node: Node) -> SlotId | None:
        """A pinned slot for a node's page; None when the capacity is used up."""
        if self.used >= self.capacity:
            return None
        if self._free:
            slot = self._free.pop()
        else:
            slot = SlotId(self._never_used)
            self._never_used += 1
        self._pinned[slot] = node
        return slot

    def pin(self, slot: SlotId) -> None:
        """A copy begins that reads the slot."""
        self._pinned[slot] = self._unpinned.pop(slot)

    def unpin(self, slot: SlotId) -> None:
        """The copy has ended; the slot is the last to go."""
        self._unpinned[slot] = self._pinned.pop(slot)

    def release(self, slot: SlotId) -> None:
        """The slot holds nothing any more."""
        if self._pinned.pop(slot, None) is None:
            del self._unpinned[slot]
        self._free.append(slot)

    def oldest(self) -> tuple[SlotId, Node] | None:
        """The next to go, if any is not pinned."""
        return next(iter(self._unpinned.items()), None)
