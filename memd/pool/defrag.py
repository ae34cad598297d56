"""Which pages to move together, so that whole blocks become empty. Pure: changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass

from memd.pool.blocks import Blocks
from memd.types import PageId

MAX_BLOCKS_LOOKED_AT = 32  # bounds the time a plan takes from the step loop


@dataclass(frozen=True, slots=True)
class PageMove:
    """The content of `source` goes to `target`, a free page."""

    source: PageId
    target: PageId


def plan_moves(
    blocks: Blocks, is_movable: Callable[[PageId], bool], max_pages: int
) -> list[PageMove]:
    """Moves out of the emptiest blocks into the fullest, no more than a step may make.

    Only blocks that can become empty lose pages: all that they hold may move, and the others have
    room for it. One that holds more than `max_pages` is emptied over several plans: it is the
    emptiest then too, and new pages are taken from the fullest blocks first.

    Args:
        blocks: Not to change before the moves are made.
        is_movable: Whether a page that is not free may move now.
        max_pages: Most moves.
    """
    wanted = blocks.surplus_blocks  # with so many blocks fewer, the others just hold everything
    if wanted <= 0 or max_pages <= 0:
        return []
    leaving: dict[int, list[PageId]] = {}
    found = 0
    for looked_at, block in enumerate(blocks.partly_used(emptiest_first=True)):
        if found >= max_pages or len(leaving) >= wanted or looked_at >= MAX_BLOCKS_LOOKED_AT:
            break
        pages = blocks.used_in(block)
        if all(map(is_movable, pages)):
            leaving[block] = pages
            found += len(pages)
    sources = [page for pages in leaving.values() for page in pages][:max_pages]
    targets: list[PageId] = []
    for block in blocks.partly_used(emptiest_first=False):
        if len(targets) >= len(sources):
            break
        if block not in leaving:
            targets += reversed(blocks.free_in(block))
    return [PageMove(source, target) for source, target in zip(sources, targets, strict=False)]
