"""Places for pages in host memory: which are free, which page each holds, which goes first."""

from collections import OrderedDict

from memd.pool.prefix_tree import Node
from memd.types import SlotId


class HostSlots:
    """Slots of one page each, least recently written or read first to go. O(1) operations.

    A slot is pinned while copies read or write it, and keeps its page until the last has ended.

    Args:
        capacity: Most slots that pages stay in; 0: no host tier. May be set while running; what
            exceeds a lower one is for the caller to evict.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.staging = 0  # slots beyond the capacity, for pages on their way to and from the disk
        self.from_disk: set[SlotId] = set()  # read from there, and not brought up since
        self.packed: set[SlotId] = set()  # hold, or will hold, a packed page
        self._never_used = 0
        self._free: list[SlotId] = []
        self._pins: dict[SlotId, int] = {}
        self._pinned: dict[SlotId, Node] = {}
        self._doomed: set[SlotId] = set()  # pinned, and nobody wants them any more
        self._unpinned: OrderedDict[SlotId, Node] = OrderedDict()

    @property
    def used(self) -> int:
        return len(self._pinned) + len(self._unpinned)

    @property
    def pinned(self) -> int:
        return len(self._pinned)

    @property
    def doomed(self) -> int:
        """Slots that will be free when the copies that use them have ended."""
        return len(self._doomed)

    @property
    def room(self) -> int:
        """Most slots in use at once; 0: pages have nowhere to go."""
        return self.capacity + self.staging

    def holders(self) -> dict[SlotId, Node]:
        """The node of each slot in use. O(n); for the audit."""
        return {**self._pinned, **self._unpinned}

    def take(self, node: Node, beyond: int = 0) -> SlotId | None:
        """A pinned slot for a node's page; None when none is left.

        Args:
            beyond: Slots beyond the capacity that it may be one of, for a page passing through.
        """
        if self.used >= self.capacity + beyond:
            return None
        if self._free:
            slot = self._free.pop()
        else:
            slot = SlotId(self._never_used)
            self._never_used += 1
        self._pinned[slot] = node
        self._pins[slot] = 1
        return slot

    def pin(self, slot: SlotId) -> None:
        """A copy begins that reads the slot."""
        if slot in self._unpinned:
            self._pinned[slot] = self._unpinned.pop(slot)
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: SlotId) -> None:
        """A copy has ended. After the last the slot is free, if nobody wants it, or last to go."""
        self._pins[slot] -= 1
        if self._pins[slot]:
            return
        del self._pins[slot]
        node = self._pinned.pop(slot)
        if slot in self._doomed:
            self._doomed.discard(slot)
            self._free_slot(slot)
        else:
            self._unpinned[slot] = node

    def release(self, slot: SlotId) -> None:
        """Nobody wants what the slot holds; it is free when no copy uses it."""
        if slot in self._pinned:
            self._doomed.add(slot)
        else:
            del self._unpinned[slot]
            self._free_slot(slot)

    def oldest(self) -> tuple[SlotId, Node] | None:
        """The next to go, if any is not pinned."""
        return next(iter(self._unpinned.items()), None)

    def _free_slot(self, slot: SlotId) -> None:
        self.from_disk.discard(slot)
        self.packed.discard(slot)
        self._free.append(slot)
