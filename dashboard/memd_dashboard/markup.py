"""Small pieces of HTML: cards, fields, legends. Pure; all text is escaped."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from memd_dashboard import palette

STYLE = """
.memd-cards {display:grid; grid-template-columns:repeat(auto-fit, minmax(9.3rem, 1fr)); gap:.75rem}
.memd-cards.many {grid-template-columns:repeat(auto-fit, minmax(13rem, 1fr))}
.memd-card {border:1px solid color-mix(in srgb, currentColor 16%, transparent); border-radius:.5rem;
  padding:.65rem .85rem .55rem; display:flex; flex-direction:column; min-width:0}
.memd-card .name {font-size:.82rem; opacity:.72; cursor:help; display:flex; gap:.3rem}
.memd-card .name::after {content:"?"; font-size:.62rem; opacity:.75; width:.95rem; height:.95rem;
  border:1px solid currentColor; border-radius:50%; display:inline-flex; align-items:center;
  justify-content:center; margin-top:.12rem; flex:none}
.memd-card .name.plain {cursor:default}
.memd-card .name.plain::after {display:none}
.memd-card .value {font-size:1.5rem; font-weight:600; white-space:nowrap; margin:.05rem 0;
  font-variant-numeric:tabular-nums}
.memd-card .value.long {font-size:1.1rem; padding:.3rem 0}
.memd-card .more {font-size:.78rem; opacity:.72; min-height:1.1rem}
.memd-card img {width:100%; height:1.9rem; margin-top:.3rem}
.memd-fields {display:grid; grid-template-columns:minmax(6.5rem, auto) 1fr; gap:.25rem .9rem;
  font-size:.87rem}
.memd-fields > span:nth-child(odd) {opacity:.66}
.memd-fields > span {overflow-wrap:anywhere}
.memd-legend {display:flex; flex-wrap:wrap; gap:.4rem 1.3rem; font-size:.85rem}
.memd-legend > span {display:flex; gap:.4rem; align-items:center}
.memd-key {color:#fff; font-weight:600; font-size:.72rem; width:1.25rem; height:1.25rem; flex:none;
  display:flex; align-items:center; justify-content:center; border-radius:.2rem}
.memd-key.faint {color:inherit}
.memd-bars {display:grid; grid-template-columns:minmax(4.5rem, auto) 1fr minmax(4rem, auto);
  gap:.45rem .9rem; font-size:.88rem; align-items:center}
.memd-bars .track {height:.95rem; border-radius:.2rem;
  background:color-mix(in srgb, currentColor 7%, transparent)}
.memd-bars .track > div {height:100%; border-radius:.2rem}
.memd-bars .text {text-align:right; font-variant-numeric:tabular-nums}
.memd-bars .help {grid-column:1 / -1; opacity:.62; font-size:.8rem; margin:-.35rem 0 .25rem}
.memd-list {display:flex; flex-direction:column}
.memd-list > div {display:flex; gap:.9rem; padding:.3rem 0; font-size:.9rem; align-items:baseline}
.memd-list > div + div {border-top:1px solid color-mix(in srgb, currentColor 9%, transparent)}
.memd-finding {border-left:4px solid; padding-left:.9rem; font-size:.92rem}
.memd-finding b {font-size:1rem}
.memd-finding ul {margin:.4rem 0 .4rem 1.1rem; padding:0}
.memd-stack {display:flex; height:2rem; border-radius:.35rem; overflow:hidden; margin:.7rem 0}
.memd-stack > div {display:flex; align-items:center; justify-content:center; color:#fff;
  font-weight:600; font-size:.8rem}
.memd-list .when {min-width:5.5rem; opacity:.65; flex:none}
"""


@dataclass(frozen=True)
class Card:
    """A figure in a frame.

    Args:
        name: What it is.
        value: With its unit.
        help: What it means, for newcomers.
        more: A small line under it.
        trend: Past values for a sparkline, oldest first.
    """

    name: str
    value: str
    help: str = ""
    more: str = ""
    trend: Sequence[float] = ()


def cards(items: Iterable[Card]) -> str:
    """Cards side by side, as many in a row as fit; none of more than six alone in the last row."""
    drawn = [_card(item) for item in items]
    kind = "memd-cards many" if len(drawn) > 6 else "memd-cards"
    return f'<div class="{kind}">{"".join(drawn)}</div>'


def _card(item: Card) -> str:
    kind = "name" if item.help else "name plain"
    size = "value" if len(item.value) < 12 else "value long"
    return (
        f'<div class="memd-card"><div class="{kind}" title="{escape(item.help)}">'
        f'{escape(item.name)}</div><div class="{size}">{escape(item.value)}</div>'
        f'<div class="more">{escape(item.more)}</div>{sparkline(item.trend)}</div>'
    )


def sparkline(values: Sequence[float], width: int = 120, height: int = 30) -> str:
    """A small filled line; nothing for fewer than two values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = high - low or 1.0
    step = width / (len(values) - 1)
    points = " ".join(
        f"{i * step:.1f},{height - 3 - (height - 6) * (value - low) / span:.1f}"
        for i, value in enumerate(values)
    )
    drawn = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'preserveAspectRatio="none"><polygon points="0,{height} {points} {width},{height}" '
        f'fill="{palette.CACHED}" opacity=".25"/><polyline points="{points}" fill="none" '
        f'stroke="{palette.ACTIVE}" stroke-width="1.6" vector-effect="non-scaling-stroke"/></svg>'
    )
    # Streamlit lets images through, and drops drawings that stand in the text.
    source = b64encode(drawn.encode()).decode()
    return f'<img alt="last hour" src="data:image/svg+xml;base64,{source}">'


def fields(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values in two columns."""
    cells = "".join(
        f"<span>{escape(name)}</span><span>{escape(value)}</span>" for name, value in rows
    )
    return f'<div class="memd-fields">{cells}</div>'


def legend(entries: Iterable[tuple[str, str, str]]) -> str:
    """Letter, colour and words of each entry; on a faint colour (#rrggbbaa) letters are as text."""
    items = "".join(
        f'<span><i class="memd-key{" faint" if len(colour) > 7 else ""}" '
        f'style="background:{colour};font-style:normal">'
        f"{escape(letter)}</i>{escape(words)}</span>"
        for letter, colour, words in entries
    )
    return f'<div class="memd-legend">{items}</div>'


def timeline(rows: Iterable[tuple[str, str]]) -> str:
    """When and what, one a line."""
    lines = "".join(
        f'<div><span class="when">{escape(when)}</span><span>{escape(what)}</span></div>'
        for when, what in rows
    )
    return f'<div class="memd-list">{lines}</div>'


def finding(title: str, colour: str, evidence: Iterable[str], action: str) -> str:
    """A finding with its evidence."""
    points = "".join(f"<li>{escape(point)}</li>" for point in evidence)
    return (
        f'<div class="memd-finding" style="border-color:{colour}"><b>{escape(title)}</b>'
        f"<ul>{points}</ul><div>{escape(action)}</div></div>"
    )


def stacked_bar(parts: Iterable[tuple[str, str, str, float, str]]) -> str:
    """Parts of a whole as one bar with a legend: name, letter, colour, amount, its text."""
    given = list(parts)
    whole = sum(part[3] for part in given) or 1.0
    segments = "".join(
        f'<div title="{escape(name)}: {escape(text)}" style="width:{100 * amount / whole:.3f}%;'
        f'background:{colour}">{escape(letter) if amount / whole > 0.03 else ""}</div>'
        for name, letter, colour, amount, text in given
    )
    entries = ((letter, colour, f"{name} {text}") for name, letter, colour, _, text in given)
    return f'<div class="memd-stack">{segments}</div>{legend(entries)}'


@dataclass(frozen=True)
class Bar:
    """An amount beside others.

    Args:
        name: Whose.
        value: Its length.
        text: The value with its unit.
        help: A line under it; "": none.
        colour: Of the bar.
    """

    name: str
    value: float
    text: str
    help: str = ""
    colour: str = palette.ACTIVE


def bars(items: Iterable[Bar]) -> str:
    """Bars one below the other, the longest as wide as there is room."""
    given = list(items)
    most = max((item.value for item in given), default=0.0) or 1.0
    rows = "".join(
        f'<span>{escape(item.name)}</span><div class="track"><div style="background:{item.colour};'
        f'width:{100 * item.value / most:.2f}%"></div></div>'
        f'<span class="text">{escape(item.text)}</span>'
        + (f'<span class="help">{escape(item.help)}</span>' if item.help else "")
        for item in given
    )
    return f'<div class="memd-bars">{rows}</div>'
