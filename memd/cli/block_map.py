"""The pool as a picture in the terminal: one cell for each block, or for some that lie together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

_LEVELS = " ▁▂▃▄▅▆▇█"
_NO_MEMORY = "·"
_CELLS_A_ROW = 64
_MOST_ROWS = 24


@dataclass(frozen=True)
class Cell:
    """Pages of some blocks that lie together, by what they hold."""

    committed_blocks: int
    pages: int
    cached_pages: int
    held_pages: int  # active or quarantined: what eviction cannot take

    @property
    def glyph(self) -> str:
        """Filled as high as the pages are occupied; anything above nothing shows."""
        if not self.committed_blocks:
            return _NO_MEMORY
        occupied = self.held_pages + self.cached_pages
        return _LEVELS[-(-occupied * (len(_LEVELS) - 1) // self.pages)]

    @property
    def style(self) -> str:
        """By how much of it eviction cannot take."""
        if not self.held_pages:
            return "green"
        return "red" if 2 * self.held_pages >= self.pages else "yellow"


def cells_of(blocks: Sequence[Mapping[str, Any]]) -> tuple[list[Cell], int]:
    """Cells of a pool's blocks, and how many blocks each covers."""
    blocks_a_cell = max(1, -(-len(blocks) // (_CELLS_A_ROW * _MOST_ROWS)))
    groups = (blocks[i : i + blocks_a_cell] for i in range(0, len(blocks), blocks_a_cell))
    cells = [
        Cell(
            committed_blocks=sum(block["committed"] for block in group),
            pages=sum(sum(block["pages"].values()) for block in group),
            cached_pages=sum(block["pages"]["cached"] for block in group),
            held_pages=sum(
                block["pages"]["active"] + block["pages"]["quarantined"] for block in group
            ),
        )
        for group in groups
    ]
    return cells, blocks_a_cell


def draw(blocks: Sequence[Mapping[str, Any]]) -> Text:
    """The picture, each row led by the id of its first block, and what its signs mean."""
    cells, blocks_a_cell = cells_of(blocks)
    text = Text()
    for start in range(0, len(cells), _CELLS_A_ROW):
        text.append(f"{start * blocks_a_cell:>7} ", "dim")
        for cell in cells[start : start + _CELLS_A_ROW]:
            text.append(cell.glyph, cell.style)
        text.append("\n")
    text.append(
        f"\none cell: {blocks_a_cell} block{'s' * (blocks_a_cell > 1)}, as high as filled;  "
    )
    text.append("green", "green").append(" cached only, ")
    text.append("yellow", "yellow").append(" some active, ")
    text.append("red", "red").append(f" half or more active;  {_NO_MEMORY} without memory\n")
    return text
