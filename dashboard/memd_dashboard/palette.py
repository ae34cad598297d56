"""Colours that people with any kind of colour vision tell apart, on light and on dark ground.

Source:
    Okabe and Ito, Color Universal Design (2008); viridis for what is ordered.
"""

ACTIVE = "#0072B2"
CACHED = "#56B4E9"
PINNED = "#CC79A7"
QUARANTINED = "#D55E00"
FREE = "#9AA5B1"
UNCOMMITTED = "#9AA5B1"

GOOD = "#009E73"
WARNING = "#E69F00"
BAD = "#D55E00"
NEUTRAL = "#7A8794"

CATEGORIES = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#B8A300",
    "#7A8794",
)
RAMP = ("#440154", "#414487", "#2A788E", "#22A884", "#7AD151", "#FDE725")

PAGE_STATES = {
    "active": ("A", ACTIVE, "in use by a request: eviction cannot take it"),
    "pinned": ("P", PINNED, "kept on purpose until its pin ends: eviction cannot take it"),
    "quarantined": ("Q", QUARANTINED, "set aside after a fault, until the next audit"),
    "cached": ("C", CACHED, "reusable: kept for prompts that begin the same, evicted when needed"),
    "free": ("F", FREE, "holds nothing"),
}


def rgb(colour: str) -> tuple[int, int, int]:
    """The parts of #rrggbb, each 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
