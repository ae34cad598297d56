"""The pool as a picture: one cell for each block in physical order, coloured by what is asked."""

import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray
from PIL import Image

from memd_dashboard import palette, show
from memd_dashboard.snapshot import JSON

Counts = NDArray[numpy.int64]
Seconds = NDArray[numpy.float64]
Pixels = NDArray[numpy.uint8]

STATES = ("not committed", "free", "cached", "pinned", "quarantined", "active")
LETTERS = ("·", "F", "C", "P", "Q", "A")
_STATE_COLOURS = (
    palette.UNCOMMITTED,
    palette.FREE,
    palette.CACHED,
    palette.PINNED,
    palette.QUARANTINED,
    palette.ACTIVE,
)
_EMPTY_OPACITY = (0.15, 0.4)  # of the states that hold nothing
_ASPECT = 2.6  # of the picture, columns to rows
NO_TENANT = "no tenant"
_HELD = ("active", "pinned", "quarantined")


@dataclass(frozen=True)
class Blocks:
    """Blocks in physical order; all arrays are [blocks].

    Args:
        committed: Whether it has memory.
        packed: Whether it is cut into packed pages.
        pages: By state, pages.
        shared: Pages held by several sequences.
        tokens: Sealed in it.
        references: Most holders of one of its pages.
        idle_seconds: Since its pages were last used; NaN where nothing is idle.
        victim_rank: Place of its first page among the next victims; -1: none.
        tenants: Who holds most of it; "" where nobody does.
    """

    committed: NDArray[numpy.bool_]
    packed: NDArray[numpy.bool_]
    pages: dict[str, Counts]
    shared: Counts
    tokens: Counts
    references: Counts
    idle_seconds: Seconds
    victim_rank: Counts
    tenants: tuple[str, ...]

    @classmethod
    def empty(cls) -> "Blocks":
        """No block at all."""
        none = numpy.zeros(0, numpy.int64)
        pages = dict.fromkeys(palette.PAGE_STATES, none)
        committed = numpy.zeros(0, numpy.bool_)
        idle = numpy.zeros(0, numpy.float64)
        return cls(committed, committed, pages, none, none, none, idle, none, ())

    def __len__(self) -> int:
        return len(self.committed)

    @property
    def size(self) -> Counts:
        """Pages in each block."""
        total: Counts = sum(self.pages.values(), numpy.zeros(len(self), numpy.int64))
        return total

    @property
    def occupancy(self) -> Seconds:
        """Share of each block's pages that hold something, 0 to 1."""
        size = numpy.maximum(self.size, 1)
        return numpy.asarray(1.0 - self.pages["free"] / size, numpy.float64)

    @property
    def states(self) -> Counts:
        """Index into STATES: the state that most hinders giving the block back."""
        state = numpy.where(self.committed, 1, 0)
        for name in ("cached", "pinned", "quarantined", "active"):
            state = numpy.where(self.pages[name] > 0, STATES.index(name), state)
        return numpy.asarray(state, numpy.int64)


def read(answer: JSON) -> Blocks:
    """Blocks of GET /admin/v1/pool/blocks."""
    columns = answer.get("columns") or {}

    def whole(name: str) -> Counts:
        return numpy.array([-1 if each is None else each for each in columns[name]], numpy.int64)

    if not columns:
        return Blocks.empty()
    names = answer.get("tenants") or []
    return Blocks(
        committed=numpy.array(columns["committed"], numpy.bool_),
        packed=numpy.array(columns["packed"], numpy.bool_),
        pages={name: whole(name) for name in palette.PAGE_STATES},
        shared=whole("shared_pages"),
        tokens=whole("sealed_tokens"),
        references=whole("references"),
        idle_seconds=numpy.array(
            [math.nan if each is None else each for each in columns["age_seconds"]], numpy.float64
        ),
        victim_rank=whole("victim_rank"),
        tenants=tuple(
            "" if each is None else names[each] or NO_TENANT for each in columns["tenant"]
        ),
    )


def steps_back(maps: JSON) -> list[float]:
    """Seconds back at which a kept map can be shown, the farthest first, the present last."""
    every, keep = maps.get("every_seconds"), maps.get("keep_seconds")
    if not every or not keep or not maps.get("times"):
        return []
    return [number * every for number in range(int(keep / every), -1, -1)]


def back_text(seconds: float) -> str:
    """A step in words: 5 min 15 s back."""
    if not seconds:
        return "now"
    minutes, rest = divmod(round(seconds), 60)
    parts = [f"{minutes} min"] * (minutes > 0) + [f"{rest} s"] * (rest > 0)
    return f"{' '.join(parts)} back"


def columns_of(count: int) -> int:
    """Cells in a row of the picture."""
    return max(1, math.ceil(math.sqrt(count * _ASPECT)))


MODES = {
    "state": "The state that most hinders giving the block back; the fuller, the stronger.",
    "occupancy": "Share of its pages that hold something.",
    "age": "Since its idle pages were last used.",
    "next eviction": "How soon its pages are evicted.",
    "references": "How many requests hold its most shared page.",
    "tenant": "Who holds most of it.",
}


def colours(blocks: Blocks, mode: str) -> Pixels:
    """Colour and opacity of each block: [blocks, 4], RGBA."""
    strength = numpy.where(blocks.committed, 1.0, 0.18)
    match mode:
        case "state":
            rgb = _table(_STATE_COLOURS)[blocks.states]
            strength = numpy.where(
                blocks.states > 1,
                0.4 + 0.6 * blocks.occupancy,
                numpy.array(_EMPTY_OPACITY)[numpy.minimum(blocks.states, 1)],
            )
        case "occupancy":
            rgb = _ramp(blocks.occupancy)
        case "references":
            most = max(2, int(blocks.references.max(initial=0)))
            rgb = _ramp(numpy.log1p(numpy.maximum(0, blocks.references)) / math.log1p(most))
            strength = numpy.where(blocks.references > 0, 1.0, 0.15)
        case "age":
            longest = max(1.0, float(numpy.nanmax(blocks.idle_seconds, initial=1.0)))
            age = numpy.nan_to_num(blocks.idle_seconds, nan=0.0)
            rgb = _ramp(numpy.log1p(age) / math.log1p(longest))
            strength = numpy.where(numpy.isnan(blocks.idle_seconds), 0.15, 1.0)
        case "next eviction":
            ranked = blocks.victim_rank >= 0
            last = max(1, int(blocks.victim_rank.max(initial=1)))
            rgb = _ramp(1.0 - blocks.victim_rank / last)
            strength = numpy.where(ranked, 1.0, 0.15)
        case _:
            place = {name: at for at, name in enumerate(tenants(blocks))}
            codes = numpy.array([place.get(name, -1) for name in blocks.tenants], numpy.int64)
            rgb = _table(palette.CATEGORIES)[codes % len(palette.CATEGORIES)]
            strength = numpy.where(codes >= 0, 1.0, 0.15)
    return numpy.concatenate([rgb, (255 * strength)[:, None]], axis=1).astype(numpy.uint8)


def tenants(blocks: Blocks) -> list[str]:
    """Names of the owners, most blocks first."""
    counts = Counter(name for name in blocks.tenants if name)
    return sorted(counts, key=lambda name: (-counts[name], name))


def _table(entries: Sequence[str]) -> NDArray[numpy.float64]:
    return numpy.array([palette.rgb(entry) for entry in entries], numpy.float64)


def _ramp(values: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    """Colours of an ordered scale for values from 0 to 1: [n, 3]."""
    table = _table(palette.RAMP)
    at = numpy.clip(values, 0.0, 1.0) * (len(table) - 1)
    knots = numpy.arange(len(table))
    return numpy.stack([numpy.interp(at, knots, table[:, part]) for part in range(3)], axis=1)


def picture(blocks: Blocks, mode: str, dimmed: NDArray[numpy.bool_] | None = None) -> bytes:
    """A PNG with one pixel for each block, row by row; what is past the last is transparent.

    Args:
        mode: One of `modes`.
        dimmed: Blocks that a filter leaves out: [blocks].
    """
    count, columns = len(blocks), columns_of(len(blocks))
    cells = colours(blocks, mode)
    if dimmed is not None:
        cells[dimmed, 3] //= 8
    pixels = numpy.zeros((-(-count // columns) * columns, 4), numpy.uint8)
    pixels[:count] = cells
    out = io.BytesIO()
    Image.fromarray(pixels.reshape(-1, columns, 4), "RGBA").save(out, "PNG")
    return out.getvalue()


def _key_colour(state: int) -> str:
    """As the map has it: #rrggbb, or #rrggbbaa of what is faint."""
    faint = f"{round(255 * _EMPTY_OPACITY[state]):02x}" if state < len(_EMPTY_OPACITY) else ""
    return _STATE_COLOURS[state] + faint


def legend(blocks: Blocks, mode: str) -> list[tuple[str, str, str]]:
    """Letter, colour and words of each entry."""
    if mode == "state":
        present = set(blocks.states.tolist())
        return [
            (LETTERS[i], _key_colour(i), f"{STATES[i]} ({int((blocks.states == i).sum()):,})")
            for i in reversed(range(len(STATES)))
            if i in present
        ]
    if mode == "tenant":
        kinds = zip(tenants(blocks), palette.CATEGORIES, strict=False)
        return [(name[:1].upper(), colour, name) for name, colour in kinds]
    low, high = {
        "occupancy": ("empty", "full"),
        "references": ("held once", "held by most"),
        "age": ("used just now", "idle longest"),
        "next eviction": ("last", "next to be evicted"),
    }[mode]
    return [("-", palette.RAMP[0], low), ("", palette.RAMP[2], ""), ("+", palette.RAMP[-1], high)]


def card(blocks: Blocks, number: int, layout: JSON) -> list[tuple[str, str]]:
    """What is known of one block: name and value."""
    pages = {name: int(counts[number]) for name, counts in blocks.pages.items()}
    block_bytes, tokens = layout.get("block_bytes", 0), int(blocks.tokens[number])
    filled = (sum(pages.values()) - pages["free"]) * layout.get("page_tokens", 0)
    rows = [
        ("State", STATES[int(blocks.states[number])]),
        (
            "Offset in the pool",
            f"from {show.size(number * block_bytes)} to {show.size((number + 1) * block_bytes)}",
        ),
        ("Pages", ", ".join(f"{count} {name}" for name, count in pages.items() if count) or "none"),
        ("Page format", "packed" if blocks.packed[number] else "full"),
        ("Tokens in sealed pages", f"{tokens:,} of {filled:,} that would fit"),
        ("Shared pages", f"{int(blocks.shared[number])}"),
    ]
    idle = float(blocks.idle_seconds[number])
    return [
        *rows,
        ("Most holders of a page", f"{max(0, int(blocks.references[number]))}"),
        ("Tenant", blocks.tenants[number] or "none"),
        ("Last used", show.UNKNOWN if math.isnan(idle) else f"{show.duration(idle)} ago"),
        ("Next victim", _victim(blocks, number, pages)),
    ]


def _victim(blocks: Blocks, number: int, pages: dict[str, int]) -> str:
    if held := [name for name in _HELD if pages[name]]:
        why = f"no: it has {' and '.join(held)} pages"
        return why if not pages["cached"] else f"in part: {pages['cached']} cached pages may go"
    if not pages["cached"]:
        return "no: nothing to evict"
    if blocks.victim_rank[number] < 0:
        return "yes, when its pages are the least recently used"
    return f"place {int(blocks.victim_rank[number]) + 1}: by least recent use"


@dataclass(frozen=True)
class Cut:
    """What the low mark would evict.

    Args:
        pages: How many.
        idle_seconds: The least idle of them; None: none would go.
    """

    pages: int
    idle_seconds: float | None


def low_mark_cut(blocks: Blocks, pool: JSON) -> Cut:
    """Pages that background reclaim would take to come down to the low mark, oldest first."""
    capacity = pool.get("capacity_pages", 0)
    occupied = capacity - pool.get("free_pages", 0)
    surplus = occupied - int(pool.get("watermark_low", 1.0) * capacity)
    cached = blocks.pages["cached"]
    wanted = max(0, min(surplus, int(cached.sum())))
    if not wanted:
        return Cut(wanted, None)
    idle = numpy.nan_to_num(blocks.idle_seconds, nan=-1.0)
    order = numpy.argsort(-idle, kind="stable")
    taken = numpy.cumsum(cached[order])
    return Cut(wanted, float(idle[order][int(numpy.searchsorted(taken, wanted))]))


_AGES = (1, 3, 10, 30, 60, 180, 600, 1800, 3600, 4 * 3600, 24 * 3600)


def idle_histogram(blocks: Blocks, cut: Cut) -> list[dict[str, Any]]:
    """Cached pages by how long they are idle; `goes`: the low mark would evict them."""
    idle, cached = blocks.idle_seconds, blocks.pages["cached"]
    rows = []
    for low, high in zip((0, *_AGES), (*_AGES, math.inf), strict=True):
        inside = (idle >= low) & (idle < high)
        name = f"≥ {show.duration(low)}" if math.isinf(high) else f"< {show.duration(high)}"
        goes = cut.idle_seconds is not None and low >= cut.idle_seconds
        rows.append(
            {
                "name": name,
                "pages": int(cached[inside].sum()),
                "goes": "evicted by the low mark" if goes else "stays",
            }
        )
    return rows


def summary(blocks: Blocks, pool: JSON) -> list[tuple[str, str, str]]:
    """Figures under the picture: name, value, what it means."""
    committed = blocks.committed
    empty = committed & (blocks.pages["free"] == blocks.size)
    return [
        ("Committed blocks", f"{int(committed.sum()):,} of {len(blocks):,}", _limit_words(pool)),
        (
            "Fragmentation",
            show.share(pool.get("fragmentation_ratio")),
            "Of the blocks that hold something, so many would be empty if pages lay densely.",
        ),
        ("Empty blocks", f"{int(empty.sum()):,}", "Hold nothing and could go back to the driver."),
        (
            "Longest free run",
            show.count(_longest_run(blocks.pages["free"] == blocks.size), "in a row"),
            "Blocks side by side that hold nothing.",
        ),
        (
            "Tail waste",
            show.size(pool.get("tail_waste_bytes")),
            "Room in the last, partly filled pages of sequences.",
        ),
        (
            "Shared pages",
            show.count(pool.get("shared_pages")),
            "Held by several requests at once, and stored once.",
        ),
        (
            "Not stored twice",
            show.size(pool.get("deduplicated_bytes")),
            "Bytes that sharing saves at this moment.",
        ),
    ]


_WAITS = {
    "requests": "running requests to end",
    "pins": "pins to be taken back",
    "reclaim": "cached pages to be evicted",
    "moves": "pages to be moved",
}


def _limit_words(pool: JSON) -> str:
    """What the figure of committed blocks means now."""
    words = "Have memory now."
    if pool.get("under_pressure"):
        words += " Others on the device need memory."
    if (waits := pool.get("limit_waits_for")) is not None:
        words += f" More than the limit allows: waits for {_WAITS.get(waits, waits)}."
    return words


def _longest_run(flags: NDArray[numpy.bool_]) -> int:
    edges = numpy.flatnonzero(numpy.diff(numpy.concatenate([[0], flags.astype(numpy.int8), [0]])))
    return int((edges[1::2] - edges[::2]).max(initial=0))
