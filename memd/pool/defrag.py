"""Which pages to move together, so that whole blocks become empty. Pure: changes nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from memd.pool.blocks import Blocks
from memd.types import BlockId, PageId

MAX_BLOCKS_LOOKED_AT = 32  # bounds the time a plan takes from the step loop


@dataclass(frozen=True, slots=True)
class PageMove:
    """The content of `source` goes to `target`, a free page. `packed`: the format there."""

    source: PageId
    target: PageId
    packed: bool = False


class PageMover(Protocol):
    """What the pool asks of whoever copies pages on the device.

    Copies are behind everything launched so far and before the next step. Where a call raises,
    nothing may have been copied that anybody will read: the pool has changed nothing and goes on.
    """

    def move(self, moves: Sequence[PageMove]) -> None:
        """Copy pages as they are; all of one format."""

    def pack(self, moves: Sequence[PageMove]) -> None:
        """Write full pages into packed ones."""


def plan_moves(
    blocks: Blocks,
    is_movable: Callable[[PageId], bool],
    max_pages: int,
    packed: bool = False,
) -> list[PageMove]:
    """Moves out of the emptiest blocks into the fullest, no more than a step may make.

    Only blocks that can become empty lose pages: all that they hold may move, and the others have
    room for it. One that holds more than `max_pages` is emptied over several plans: it is the
    emptiest then too, and new pages are taken from the fullest blocks first.

    Args:
        blocks: Not to change before the moves are made.
        is_movable: Whether a page that is not free may move now.
        max_pages: Most moves.
        packed: The format of the pages that move.
    """
    # With so many blocks fewer, the others just hold everything.
    wanted = blocks.surplus_packed_blocks if packed else blocks.surplus_full_blocks
    if wanted <= 0 or max_pages <= 0:
        return []
    leaving = _leaving(blocks, is_movable, packed, wanted, max_pages, MAX_BLOCKS_LOOKED_AT)
    return _paired(blocks, leaving, packed, max_pages)


def plan_emptying(
    blocks: Blocks, is_movable: Callable[[PageId], bool], packed: bool, count: int
) -> list[PageMove]:
    """Moves that empty up to `count` blocks of a format altogether, however many they are."""
    surplus = blocks.surplus_packed_blocks if packed else blocks.surplus_full_blocks
    size = blocks.packed_pages_per_block if packed else blocks.pages_per_block
    count = min(count, surplus)
    if count <= 0:
        return []
    leaving = _leaving(blocks, is_movable, packed, count, count * size, blocks.committed_blocks)
    return _paired(blocks, leaving, packed, count * size)


def _leaving(
    blocks: Blocks,
    is_movable: Callable[[PageId], bool],
    packed: bool,
    most_blocks: int,
    most_pages: int,
    max_blocks_looked_at: int,
) -> dict[BlockId, list[PageId]]:
    """The emptiest blocks whose pages may all move, with their pages."""
    leaving: dict[BlockId, list[PageId]] = {}
    found = 0
    for looked_at, block in enumerate(blocks.partly_used(emptiest_first=True, packed=packed)):
        if found >= most_pages or len(leaving) >= most_blocks or looked_at >= max_blocks_looked_at:
            break
        pages = blocks.used_in(block)
        if all(map(is_movable, pages)):
            leaving[block] = pages
            found += len(pages)
    return leaving


def _paired(
    blocks: Blocks, leaving: dict[BlockId, list[PageId]], packed: bool, max_pages: int
) -> list[PageMove]:
    """The pages of blocks that are to be left, each with a place in the fullest of the others."""
    sources = [page for pages in leaving.values() for page in pages][:max_pages]
    targets: list[PageId] = []
    for block in blocks.partly_used(emptiest_first=False, packed=packed):
        if len(targets) >= len(sources):
            break
        if block not in leaving:
            targets += reversed(blocks.free_in(block))
    pairs = zip(sources, targets, strict=False)
    return [PageMove(source, target, packed) for source, target in pairs]
