"""What a model of the pool remembers, and memory that checks who commits and writes what."""

from collections.abc import Sequence
from dataclasses import dataclass

from memd.errors import OutOfDeviceMemory
from memd.pool.blocks import Blocks
from memd.pool.defrag import PageMove
from memd.pool.layout import KVLayout
from memd.pool.packing import PackingSchedule
from memd.pool.prefix_tree import Node
from memd.pool.sequence import PoolSequence
from memd.types import BlockId, PageId


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


@dataclass(frozen=True)
class EveryPage(PackingSchedule):
    """A schedule whose step is a page, so that short sequences are packed, too."""

    def packed_pages(self, num_tokens: int) -> range:
        first = -(-self.full_precision_tokens // self.page_tokens)
        return range(first, max(first, (num_tokens - self.recent_tokens) // self.page_tokens))


class FakeMemory:
    """The bytes behind pages of small numbers, and the `PageMover` over them.

    A full page has two bytes for each token, a packed page a mark and then one for each: whoever
    reads a page in the wrong format, or one that another has overwritten, is found out.
    """

    PACKED = 0xAA

    def __init__(self, layout: KVLayout, num_blocks: int, blocks: Blocks) -> None:
        self.fail = False
        self.calls: list[tuple[str, int]] = []
        self._layout = layout
        self._blocks = blocks
        self._bytes = bytearray(num_blocks * layout.block_bytes)

    def write(self, page: PageId, offset: int, token: int) -> None:
        """Write the KV of one token of a full page."""
        assert not self._blocks.is_packed(page)
        start = self._layout.page_offset_bytes(page) + 2 * offset
        self._bytes[start : start + 2] = bytes((token + 1, token + 1))

    def read(self, page: PageId) -> list[int | None]:
        """The tokens of a page; None for what was not written."""
        data = self.raw(page, self._blocks.is_packed(page))
        if self._blocks.is_packed(page):
            assert data[0] == self.PACKED
            return [byte - 101 for byte in data[1 : self._layout.page_tokens + 1]]
        pairs = zip(data[::2], data[1::2], strict=True)
        return [one - 1 if one == other > 0 else None for one, other in pairs]

    def raw(self, page: PageId, packed: bool) -> bytes:
        """The bytes of a page of a format."""
        start = self._layout.page_offset_bytes(page, packed)
        return bytes(self._bytes[start : start + self._layout.size_bytes(packed)])

    def put(self, page: PageId, packed: bool, data: bytes) -> None:
        """Overwrite a page of a format."""
        start = self._layout.page_offset_bytes(page, packed)
        assert len(data) == self._layout.size_bytes(packed)
        self._bytes[start : start + len(data)] = data

    def move(self, moves: Sequence[PageMove]) -> None:
        self._begin("move", moves)
        packed = moves[0].packed
        assert all(move.packed == packed for move in moves), "two formats in one call"
        contents = [self.raw(move.source, packed) for move in moves]
        for move, data in zip(moves, contents, strict=True):
            assert self._blocks.is_packed(move.source) == packed
            assert self._blocks.is_packed(move.target) == packed
            self.put(move.target, packed, data)
        for move in moves:
            self.wipe(move.source, packed)

    def pack(self, moves: Sequence[PageMove]) -> None:
        self._begin("pack", moves)
        for move in moves:
            assert move.packed
            assert not self._blocks.is_packed(move.source)
            tokens = self.read(move.source)
            assert None not in tokens, "a page is packed that is not full"
            data = bytes([self.PACKED, *(101 + (token or 0) for token in tokens)])
            self.put(move.target, True, data.ljust(self._layout.size_bytes(True), b"x"))
            self.wipe(move.source, packed=False)

    def wipe(self, page: PageId, packed: bool) -> None:
        """Whoever still reads a page is found out."""
        self.put(page, packed, bytes(self._layout.size_bytes(packed)))

    def _begin(self, name: str, moves: Sequence[PageMove]) -> None:
        ends = [end for move in moves for end in (move.source, move.target)]
        assert len(set(ends)) == len(ends) > 0
        if self.fail:
            raise RuntimeError("told to fail")
        self.calls.append((name, len(moves)))
