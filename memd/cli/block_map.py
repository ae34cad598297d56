"""The pool as a picture in the terminal: one cell for each block, or for some that lie together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

_LEVELS = " ▁▂▃▄▅▆▇█"
_NO_MEMORY = "·"
_CELLS_A_ROW = 64
_MOST_ROWS = 24
_HELD = ("active", "pinned", "quarantined")


@dataclass(frozen=True)
class Cell:
    """Pages of some blocks that lie together, by what they hold."""

    committed_blocks: int
    pages: int
    cached_pages: int
    held_pages: int  # what eviction cannot take
    packed: bool  # some of the blocks are cut into packed pages

    @property
    def glyph(self) -> str:
        """Filled as high as the pages are occupied; anything above nothing shows."""
        if not self.committed_blocks:
            return _NO_MEMORY
        occupied = self.held_pages + self.cached_pages
        return _LEVELS[-(-occupied * (len(_LEVELS) - 1) // self.pages)]

    @property
    def style(self) -> str:
        """By how much of it eviction cannot take, and by the format of pages."""
        if not self.held_pages:
            colour = "green"
        else:
            colour = "red" if 2 * self.held_pages >= self.pages else "yellow"
        return f"{colour} underline" if self.packed else colour


def cells_of(columns: Mapping[str, Sequence[int]]) -> tuple[list[Cell], int]:
    """Cells of a pool's blocks, given in columns, and how many blocks each covers."""
    count = len(columns["block"]) if columns else 0
    blocks_a_cell = max(1, -(-count // (_CELLS_A_ROW * _MOST_ROWS)))

    def total(start: int, *names: str) -> int:
        part = slice(start, start + blocks_a_cell)
        return sum(sum(columns[name][part]) for name in names)

    cells = [
        Cell(
            committed_blocks=total(start, "committed"),
            pages=total(start, *_HELD, "cached", "free"),
            cached_pages=total(start, "cached"),
            held_pages=total(start, *_HELD),
            packed=total(start, "packed") > 0,
        )
        for start in range(0, count, blocks_a_cell)
    ]
    return cells, blocks_a_cell


def draw(columns: Mapping[str, Sequence[int]]) -> Text:
    """The picture, each row led by the id of its first block, and what its signs mean."""
    cells, blocks_a_cell = cells_of(columns)
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
    text.append("yellow", "yellow").append(" some held, ")
    text.append("red", "red").append(f" half or more held;  {_NO_MEMORY} without memory\n")
    if any(cell.packed for cell in cells):
        text.append("underlined", "underline").append(" packed pages\n")
    return text
