"""The overview: what fills the memory, whether requests wait and why, what changed lately."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from memd_dashboard import palette, show
from memd_dashboard.markup import Card
from memd_dashboard.snapshot import JSON, Snapshot
from memd_dashboard.view import tuning

CHANGES_SECONDS = 86400.0
WAITING = {
    "capacity": "for memory: the pool has too few pages that are free or may be evicted",
    "prefix": "for another request that is just computing the same beginning",
    "transfer": "for pages being copied back from the host",
    "quota": "for memory: their tenant is above its quota while others need it",
    "slots": "for a place in the batch",
}


@dataclass(frozen=True)
class Part:
    """Pages of one state.

    Args:
        name: The state.
        letter: For eyes that do not tell the colours apart.
        pages: How many.
        ratio: Of the capacity.
    """

    name: str
    letter: str
    colour: str
    help: str
    pages: int
    size_bytes: int
    ratio: float


def pool_parts(pool: JSON) -> list[Part]:
    """The states of a pool's pages, what eviction cannot take first; [] when unknown."""
    capacity = pool.get("capacity_pages")
    if not capacity:
        return []
    page_bytes = (pool.get("layout") or {}).get("page_bytes", 0)
    counts = {name: pool.get(f"{name}_pages") or 0 for name in palette.PAGE_STATES}
    return [
        Part(name, letter, colour, text, pages, pages * page_bytes, pages / capacity)
        for name, (letter, colour, text) in palette.PAGE_STATES.items()
        if (pages := counts[name]) or name in ("active", "cached", "free")
    ]


def pool_bar(pool: JSON) -> str:
    """The pool as one bar with the marks drawn on it, and its legend; HTML."""
    parts = pool_parts(pool)
    segments = "".join(
        f'<div title="{part.name}: {show.count(part.pages)} pages, {show.size(part.size_bytes)}" '
        f'style="width:{100 * part.ratio:.3f}%;background:{_fill(part)}">'
        f"{part.letter if part.ratio > 0.03 else ''}</div>"
        for part in parts
    )
    marks = "".join(
        f'<div class="mark" style="left:{100 * pool[f"watermark_{level}"]:.2f}%">'
        f'<span class="{level}">{level} {show.share(pool[f"watermark_{level}"])}</span></div>'
        for level in ("low", "high")
        if f"watermark_{level}" in pool
    )
    legend = "".join(
        f'<div class="item" title="{part.help}">'
        f'<i style="background:{_fill(part)}">{part.letter}</i><span><b>{part.name}</b><br>'
        f"{show.size(part.size_bytes)} · {show.share(part.ratio)}</span></div>"
        for part in parts
    )
    return (
        f"<style>{_BAR_STYLE}</style>"
        f'<div class="memd-pool"><div class="bar">{segments}{marks}</div>'
        f'<div class="legend">{legend}</div></div>'
    )


def _fill(part: Part) -> str:
    return "transparent" if part.name == "free" else part.colour


_BAR_STYLE = """
.memd-pool {padding-top:1.5rem}
.memd-pool .bar {position:relative; display:flex; height:2.4rem; border-radius:.35rem;
  background:color-mix(in srgb, currentColor 9%, transparent)}
.memd-pool .bar > div:not(.mark) {display:flex; align-items:center; text-indent:.6rem;
  color:#fff; font-weight:600; font-size:.8rem; overflow:hidden; transition:width .4s}
.memd-pool .bar > div:first-child {border-radius:.35rem 0 0 .35rem}
.memd-pool .mark {position:absolute; top:-.35rem; bottom:-.35rem; width:0;
  border-left:2px dashed currentColor}
.memd-pool .mark span {position:absolute; top:-1.25rem; font-size:.78rem; white-space:nowrap;
  opacity:.85}
.memd-pool .mark .low {right:.2rem}
.memd-pool .mark .high {left:.2rem}
.memd-pool .legend {display:flex; flex-wrap:wrap; gap:.6rem 2rem; margin-top:.9rem;
  font-size:.86rem}
.memd-pool .item {display:flex; gap:.55rem; align-items:center; line-height:1.25; cursor:help}
.memd-pool .item i {display:flex; align-items:center; justify-content:center; width:1.5rem;
  height:1.5rem; border-radius:.25rem; color:#fff; font-style:normal; font-weight:600;
  font-size:.78rem; border:1px solid color-mix(in srgb, currentColor 25%, transparent)}
.memd-pool .item i[style*="transparent"] {color:inherit}
.memd-pool .bar > div[style*="transparent"] {color:inherit}
"""


def numbers(snap: Snapshot) -> list[Card]:
    """The six figures of the overview, of the last five minutes, with the last hour."""
    window = snap.window(300)
    found = window.ratio("memd_prefix_hit_tokens_total", "memd_prefix_query_tokens_total")
    first = window.quantile(0.95, "memd_time_to_first_token_seconds")
    gap = window.quantile(0.95, "memd_inter_token_latency_seconds")
    held = window.last("memd_pool_active_ratio")
    speed = window.rate("memd_generated_tokens_total")
    return [
        _number(
            snap,
            "Unreclaimable",
            held,
            show.share,
            "memd_pool_active_ratio",
            "Share of the pool that eviction cannot take: in use, pinned or quarantined. A pool "
            "full of reusable pages is healthy; this number is not to come near 100 %.",
        ),
        _number(
            snap,
            "Prefix hits",
            found,
            show.share,
            "model:memd_prefix_hit:ratio_rate5m",
            "Share of prompt tokens whose KV was already there, in the last five minutes.",
        ),
        _number(
            snap,
            "First token, p95",
            first,
            show.duration,
            "model:memd_time_to_first_token_seconds:p95_rate5m",
            "19 of 20 requests got their first token within this time, in the last five minutes.",
        ),
        _number(
            snap,
            "Token gap, p95",
            gap,
            show.duration,
            "model:memd_inter_token_latency_seconds:p95_rate5m",
            "19 of 20 gaps between two tokens of a stream were shorter, in the last five minutes.",
        ),
        _number(
            snap,
            "Generated",
            speed,
            lambda rate: show.count(rate, "tok/s"),
            "memd_generated_tokens_total",
            "Output tokens a second, all requests together, in the last five minutes.",
        ),
        _number(
            snap,
            "Bad requests",
            _bad_share(snap),
            show.share,
            "model:memd_request_bad:ratio_rate5m",
            "Share of requests that ended by an error, a time-out or a refusal for want of room, "
            "in the last five minutes.",
        ),
    ]


def _number(
    snap: Snapshot,
    name: str,
    value: float | None,
    form: Callable[[float | None], str],
    metric: str,
    help: str,
) -> Card:
    day_ago = yesterday(snap, metric)
    more = f"yesterday {form(day_ago)}" if day_ago is not None else ""
    hour = [each for _, each in trend(snap, metric)]
    # Until a page has seen two readings of the counters, the last kept figure stands for them.
    if value is None and not snap.window(300).seconds and hour:
        value = hour[-1]
    return Card(name, form(value), help, more, hour)


def trend(snap: Snapshot, metric: str) -> list[tuple[float, float]]:
    """Unix seconds and value of a metric in the last hour; of a counter, its growth per second."""
    return _values(snap.get(metric).get("hour"), metric)


def yesterday(snap: Snapshot, metric: str) -> float | None:
    """Mean of a gauge in the hour before this time yesterday; None: not kept, or a counter."""
    if metric.endswith("_total"):
        return None
    found = _values(snap.get(metric).get("day_ago"), metric)
    return found[-1][1] if found else None


def _values(answer: JSON | None, metric: str) -> list[tuple[float, float]]:
    series = (answer or {}).get("series") or []
    if not series:
        return []
    points = list(zip(series[0]["times"], series[0]["values"], strict=True))
    if not metric.endswith("_total"):
        return points
    return [
        (end, (after - before) / (end - start))
        for (start, before), (end, after) in pairwise(points)
        if after >= before
    ]


_BAD = ("error", "timeout", "overloaded")
_COUNTED = (*_BAD, "ok")


def _bad_share(snap: Snapshot) -> float | None:
    window = snap.window(300)
    grown = {each: window.increase("memd_requests_total", outcome=each) for each in _COUNTED}
    every = sum(value or 0 for value in grown.values())
    return sum(grown[each] or 0 for each in _BAD) / every if every else None


def open_requests(snap: Snapshot, state: str) -> int | None:
    """How many are in this state, in the same answer that says why some wait; None: not known."""
    if snap.reading("requests").value is None:
        return None
    return len([row for row in snap.rows("requests", "requests") if row.get("state") == state])


def waiting(snap: Snapshot) -> list[tuple[str, int, str]]:
    """Why requests wait: reason, how many, in words; most first."""
    by: dict[str, int] = {}
    for row in snap.rows("requests", "requests"):
        if row.get("state") == "waiting":
            reason = str(row.get("waiting_for") or "capacity")
            by[reason] = by.get(reason, 0) + 1
    rows = [(reason, number, WAITING.get(reason, reason)) for reason, number in by.items()]
    return sorted(rows, key=lambda row: -row[1])


@dataclass(frozen=True)
class Change:
    """Something that changed: a setting, a restart."""

    at: float
    icon: str
    text: str


def changes(snap: Snapshot, limit: int = 8) -> list[Change]:
    """Settings and events of the last day, newest first."""
    units = tuning.units(snap.get("settings"))
    found = [
        Change(row["time"], "tune", _revision_text(row, units))
        for row in snap.rows("settings_history", "history")
        if row.get("kind") != "start"
    ]
    found += [
        Change(row["time"], _ICONS.get(str(row.get("kind")), "info"), str(row.get("message", "")))
        for row in snap.rows("events", "events")
        if row.get("kind") not in _NOISE
    ]
    recent = [change for change in found if snap.now - change.at < CHANGES_SECONDS]
    return sorted(recent, key=lambda change: -change.at)[:limit]


_ICONS = {"start": "power_settings_new", "stop": "power_off", "engine_death": "warning"}
_NOISE = {"settings_change", "reclaim"}


def _revision_text(row: JSON, units: Mapping[str, str | None]) -> str:
    what = tuning.differences(row.get("changes") or {}, units) or str(row.get("kind"))
    return f"{what}, by {row.get('who', '?')}: {row.get('reason', '')}"
