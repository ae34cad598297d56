"""Orders to copy a page between tiers, and what is remembered of one while it is under way."""

from collections.abc import Callable
from dataclasses import dataclass

from memd.pool.prefix_tree import Node
from memd.types import EvictionReason, PageId, SlotId, TransferId, TransferPath


@dataclass(frozen=True, slots=True)
class Transfer:
    """An order to copy one page between the device and a host slot.

    `packed`: the format of the page, and so how many bytes it has (`KVLayout.size_bytes`), from the
    beginning of the slot, which has room for either.
    """

    id: TransferId
    path: TransferPath
    page: PageId
    slot: SlotId
    packed: bool = False


@dataclass(slots=True)
class Move:
    """A transfer under way. `node` is None once its content is no longer wanted."""

    transfer: Transfer
    node: Node | None
    ordered_at: float  # monotonic seconds
    then_evict: EvictionReason | None = None


class Orders:
    """Transfers that were ordered and have not ended yet.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.under_way: dict[TransferId, Move] = {}
        self.packed: dict[TransferId, Transfer] = {}  # of those under way: the packed pages
        self._new: list[Transfer] = []
        self._serial = 0

    def add(
        self,
        path: TransferPath,
        page: PageId,
        slot: SlotId,
        node: Node,
        packed: bool,
        then_evict: EvictionReason | None = None,
    ) -> TransferId:
        """Order a copy of a page of a format."""
        self._serial += 1
        transfer = Transfer(TransferId(self._serial), path, page, slot, packed)
        if packed:
            self.packed[transfer.id] = transfer
        self.under_way[transfer.id] = Move(transfer, node, self._clock(), then_evict)
        self._new.append(transfer)
        return transfer.id

    def end(self, transfer_id: TransferId) -> Move | None:
        """A copy has ended; None if there was none of that number."""
        self.packed.pop(transfer_id, None)
        return self.under_way.pop(transfer_id, None)

    def take(self) -> list[Transfer]:
        """Orders given since the last call, in order."""
        new, self._new = self._new, []
        return new
