"""What a model of the pool remembers, and block memory that checks who commits what."""

from dataclasses import dataclass

from memd.errors import OutOfDeviceMemory
from memd.pool.prefix_tree import Node
from memd.pool.sequence import PoolSequence
from memd.types import BlockId


class FakeBacking:
    """Block memory that can be told to refuse, and that checks who commits what."""

    def __init__(self) -> None:
        self.committed: set[BlockId] = set()
        self.refuse = False
        self.settled = 0

    def commit(self, block: BlockId) -> None:
        assert block not in self.committed
        if self.refuse:
            raise OutOfDeviceMemory("told to refuse")
        self.committed.add(block)

    def settle(self) -> None:
        self.settled += 1

    def decommit(self, block: BlockId) -> None:
        self.committed.remove(block)


@dataclass
class Running:
    """A sequence as the engine would drive it."""

    sequence: PoolSequence
    namespace: str
    num_computed: int


@dataclass
class Published:
    """A page that was published, by the tokens from the root to its last one."""

    namespace: str
    tokens: list[int]
    node: Node
