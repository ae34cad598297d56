"""The prefix tree: what is cached, who shares it, and why prompts miss."""

from collections.abc import Sequence
from datetime import tzinfo
from itertools import pairwise
from typing import Any

import altair as alt

from memd_dashboard import palette, show
from memd_dashboard.markup import Bar
from memd_dashboard.scrape import Window
from memd_dashboard.snapshot import JSON
from memd_dashboard.view import chart

MISSES = {
    "cold": "never seen before, or a changed token in front of it",
    "evicted": "was cached, and had to go",
    "final": "the last token of a prompt, which is always computed",
    "isolated": "cached for another tenant or salt",
    "unaligned": "less than could be shared",
}


def table(rows: Sequence[JSON], now: float) -> list[dict[str, Any]]:
    """Cached prefixes with the columns of the table, the largest first."""
    return [
        {
            "id": row.get("id"),
            "tenant": row.get("tenant") or "",
            "from": row.get("start_token"),
            "tokens": row.get("tokens"),
            "size": show.size(row.get("bytes")),
            "only on the host": row.get("host_only_pages"),
            "held by": row.get("holders"),
            "saves": show.size(row.get("deduplicated_bytes")),
            "hits": row.get("hits"),
            "hits/h": _rounded(row.get("hits_per_hour")),
            "last hit": show.ago(row.get("last_hit_at"), now),
            "pin": pin_text(row, now),
        }
        for row in sorted(rows, key=lambda row: -(row.get("tokens") or 0))
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def pin_text(row: JSON, now: float) -> str:
    """Whether and for how long a prefix is pinned."""
    if not row.get("pinned"):
        return ""
    until = row.get("pinned_until")
    text = "until unpinned" if until is None else f"for {show.duration(max(0.0, until - now))}"
    return f"{text} ({row['pin_label']})" if row.get("pin_label") else text


def icicle(rows: Sequence[JSON], most_lanes: int = 48) -> alt.Chart:
    """Stretches of tokens: position in the prompt to the right, branches one below the other.

    A stretch stands as high as the branches that follow it, so that what is shared is large.
    """
    spans = layout(rows, most_lanes)
    lanes = max((span["below"] for span in spans), default=1)
    most = max((span["holders"] for span in spans), default=1) or 1
    gap = 0.12
    drawn: alt.Chart = (
        alt.Chart(chart.data([{**span, "below": span["below"] - gap} for span in spans]))
        .mark_rect(cornerRadius=2)
        .encode(
            x=alt.X("start:Q", axis=alt.Axis(title="token position in the prompt", grid=False)),
            x2="end:Q",
            y=alt.Y(
                "lane:Q", axis=None, scale=alt.Scale(domain=[0, lanes], reverse=True, nice=False)
            ),
            y2="below:Q",
            color=alt.Color(
                "holders:Q",
                scale=alt.Scale(domain=[0, most], range=[palette.CACHED, palette.ACTIVE]),
                legend=alt.Legend(
                    title="requests that hold it now",
                    orient="top",
                    gradientLength=160,
                    format="d",
                    values=sorted({0, most // 2, most}),
                ),
            ),
            tooltip=[
                alt.Tooltip("id:N", title="prefix"),
                alt.Tooltip("start:Q", title="from token", format=","),
                alt.Tooltip("tokens:Q", title="tokens", format=","),
                alt.Tooltip("holders:Q", title="held by"),
                alt.Tooltip("hits:Q", title="hits", format=","),
            ],
        )
        .properties(
            height=max(70, min(340, 16 * lanes)) + 2 * chart.LEGEND_PIXELS + chart.AXIS_PIXELS
        )
    )
    return drawn


def layout(rows: Sequence[JSON], most_lanes: int) -> list[dict[str, Any]]:
    """Places of stretches: `start` and `end` in tokens, `lane` and `below` in lanes.

    The largest beginnings come first; what does not fit into the lanes is left out.
    """
    known = {row["id"] for row in rows}
    branches: dict[Any, list[JSON]] = {}
    for row in sorted(rows, key=lambda row: -(row.get("tokens") or 0)):
        parent = row.get("parent_id")
        branches.setdefault(parent if parent in known else None, []).append(row)
    spans: list[dict[str, Any]] = []

    def place(row: JSON, lane: int) -> int:
        """Put a stretch and its branches; the lanes they take."""
        below = lane
        for branch in branches.get(row["id"], ()):
            if below < most_lanes:
                below += place(branch, below)
        height = max(1, below - lane)
        start = row.get("start_token") or 0
        spans.append(
            {
                "id": row["id"],
                "start": start,
                "end": start + (row.get("tokens") or 0),
                "tokens": row.get("tokens") or 0,
                "holders": row.get("holders") or 0,
                "hits": row.get("hits") or 0,
                "lane": lane,
                "below": lane + height,
            }
        )
        return height

    lane = 0
    for root in branches.get(None, ()):
        if lane >= most_lanes:
            break
        lane += place(root, lane)
    return spans


def misses(window: Window) -> list[Bar]:
    """Prompt tokens of the last minutes that had to be computed, by reason."""
    reasons = window.by("memd_prefix_miss_tokens_total", "reason")
    found = {
        reason: window.increase("memd_prefix_miss_tokens_total", reason=reason) or 0.0
        for reason in reasons
    }
    return [
        Bar(reason, grown, show.count(grown, "tokens"), MISSES.get(reason, ""))
        for reason, grown in sorted(found.items(), key=lambda item: -item[1])
    ]


MISS_REASONS = {
    "unusable": "more of it was there, but could not be used in time",
    "evicted": "it was there, and had been evicted",
    "isolated": "another tenant or salt had more of it; caches are kept apart",
    "differs": "cached prompts go on differently from there",
    "unseen": "nothing that goes on from there had been seen",
}
MISS_COLOURS = {
    "cold": palette.CACHED,
    "evicted": palette.WARNING,
    "final": palette.NEUTRAL,
}


def miss_text(tokens: int | None, first_token: int | None, reason: str | None) -> str:
    """Prompt tokens that were not found, from where on, and why."""
    if tokens is None:
        return show.UNKNOWN
    if not tokens:
        return "none"
    why = MISS_REASONS.get(str(reason), str(reason))
    return f"{show.count(tokens)} tokens, from token {show.count(first_token)} on: {why}"


def missed_requests(rows: Sequence[JSON], zone: tzinfo | None) -> list[dict[str, Any]]:
    """Finished requests that missed, those that missed most first."""
    missed = sorted(
        (row for row in rows if row.get("missed_tokens")), key=lambda row: -row["missed_tokens"]
    )
    return [
        {
            "request": row.get("request_id"),
            "finished": show.date(row.get("time"), zone),
            "tenant": row.get("tenant") or "",
            "prompt": row.get("prompt_tokens"),
            "missed": row["missed_tokens"],
            "evicted": row.get("missed_evicted_tokens"),
            "from token": row.get("first_missing_token"),
            "why": MISS_REASONS.get(str(row.get("miss_reason")), ""),
        }
        for row in missed
    ]


def miss_history(answer: JSON, zone: tzinfo | None) -> list[dict[str, Any]]:
    """Missed tokens of each step by reason: the growth of counters, after restarts from 0."""
    found = []
    for series in (answer.get("hour") or {}).get("series") or ():
        reason = str((series.get("labels") or {}).get("reason"))
        points = zip(pairwise(series["times"]), pairwise(series["values"]), strict=True)
        for (_, at), (before, after) in points:
            grown = after - before if after >= before else after
            found.append(
                {"at": 1000 * at, "clock": show.clock(at, zone), "reason": reason, "tokens": grown}
            )
    return found if any(row["tokens"] for row in found) else []


def miss_chart(rows: Sequence[dict[str, Any]]) -> alt.Chart:
    """Missed tokens a minute, stacked by reason."""
    reasons = list(MISS_COLOURS)
    drawn: alt.Chart = (
        alt.Chart(chart.data(rows), height=130 + chart.AXIS_PIXELS + chart.LEGEND_PIXELS)
        .mark_bar(binSpacing=0)
        .encode(
            x=alt.X("at:T", axis=chart.time_axis(6)),
            y=alt.Y("sum(tokens):Q", axis=chart.value_axis("tokens a minute")),
            color=alt.Color(
                "reason:N",
                scale=alt.Scale(domain=reasons, range=[MISS_COLOURS[each] for each in reasons]),
                legend=alt.Legend(title=None, orient="top"),
            ),
            tooltip=[
                alt.Tooltip("clock:N", title="minute from"),
                alt.Tooltip("reason:N"),
                alt.Tooltip("tokens:Q", format=",.0f"),
            ],
        )
    )
    return drawn


WHY = {
    "complete": "All of it is cached; the last token is always computed.",
    "awaited": "Another request is just computing what follows.",
    "evicted": "What follows was cached, and was evicted.",
    "isolated": "Another tenant or salt has more of it; caches are kept apart.",
    "differs": "Cached prompts go on differently from there.",
    "unseen": "Nothing that goes on from there has been seen.",
}


def explained(answer: JSON) -> list[tuple[str, str]]:
    """What an explanation says, as names and values."""
    hits = answer.get("hit_tokens") or {}
    found = ", ".join(f"{show.count(each)} on the {tier}" for tier, each in hits.items() if each)
    rows = [
        ("Prompt", show.count(answer.get("prompt_tokens"), "tokens")),
        ("Would be found", found or "nothing"),
        ("Would be computed", show.count(answer.get("computed_tokens"), "tokens")),
        ("It parts at token", show.count(answer.get("first_missing_token"))),
        ("Because", WHY.get(str(answer.get("reason")), str(answer.get("reason")))),
    ]
    if answer.get("evicted_age_seconds") is not None:
        rows.append(("Evicted", f"{show.duration(answer['evicted_age_seconds'])} ago"))
    if nearest := answer.get("nearest"):
        rows.append(("Nearest prefix", f"{nearest['id']}, {show.count(nearest['tokens'])} tokens"))
    return rows
