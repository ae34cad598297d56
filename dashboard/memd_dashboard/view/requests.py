"""Open and finished requests as tables, figures and a timeline."""

import statistics
from collections.abc import Sequence
from typing import Any

import altair as alt

from memd_dashboard import palette, show
from memd_dashboard.snapshot import JSON
from memd_dashboard.view import chart
from memd_dashboard.view.prefixes import miss_text

PHASES = {
    "queued": ("Q", palette.WARNING),
    "prefill": ("P", palette.CACHED),
    "decode": ("D", palette.ACTIVE),
}


def table(rows: Sequence[JSON]) -> list[dict[str, Any]]:
    """Open requests, the oldest first, with the columns of the live table."""
    ordered = sorted(rows, key=lambda row: -(row.get("age_seconds") or 0.0))
    return [
        {
            "id": row["id"],
            "tenant": row.get("tenant") or "",
            "state": state_text(row),
            "priority": row.get("priority"),
            "prompt": row.get("prompt_tokens"),
            "cached": row.get("cached_tokens"),
            "generated": row.get("generated_tokens"),
            "pages": row.get("pages"),
            "queued": show.duration(row.get("queue_seconds")),
            "speed": speed(row),
            "preempted": row.get("preemptions"),
            "age": show.duration(row.get("age_seconds")),
        }
        for row in ordered
    ]


def state_text(row: JSON) -> str:
    """State in words, with what a waiting request waits for."""
    state = str(row.get("state") or "starting")
    reason = row.get("waiting_for")
    return f"{state} ({reason})" if state == "waiting" and reason else state


def speed(row: JSON) -> float | None:
    """Output tokens a second since the request left the queue."""
    if row.get("age_seconds") is None or row.get("queue_seconds") is None:
        return None
    ran = row["age_seconds"] - row["queue_seconds"]
    generated = row.get("generated_tokens") or 0
    return round(generated / ran, 1) if ran > 0 and generated else None


def filtered(rows: Sequence[JSON], text: str, states: Sequence[str]) -> list[JSON]:
    """Rows whose id or tenant contains the text and that are in one of the states."""
    text = text.casefold()
    return [
        row
        for row in rows
        if (not states or row.get("state") in states)
        and (
            text in str(row.get("id", "")).casefold()
            or text in str(row.get("tenant") or "").casefold()
        )
    ]


def card(row: JSON, page_bytes: int) -> list[tuple[str, str]]:
    """What is known of one open request."""
    prompt, cached = row.get("prompt_tokens"), row.get("cached_tokens")
    share = cached / prompt if prompt and cached is not None else None
    pages = row.get("pages")
    held = show.size(pages * page_bytes) if pages is not None else show.UNKNOWN
    rows = [
        ("State", state_text(row)),
        ("Tenant", row.get("tenant") or "none"),
        ("Priority", f"{row.get('priority', 0)} (lower goes first)"),
        (
            "Prompt",
            f"{show.count(prompt)} tokens, {show.count(cached)} cached ({show.share(share)})",
        ),
        ("Not found", not_found(row)),
        ("Computed", show.count(row.get("computed_tokens"), "tokens")),
        (
            "Output",
            f"{show.count(row.get('generated_tokens'))} of at most "
            f"{show.count(row.get('max_tokens'))} tokens",
        ),
        ("Speed", show.count(speed(row), "tok/s")),
        (
            "Memory",
            f"{show.count(pages)} pages, {held}",
        ),
        ("Preempted", f"{row.get('preemptions', 0)} times"),
    ]
    return [(name, str(value)) for name, value in rows]


def not_found(row: JSON) -> str:
    """Prompt tokens of an open request that were not cached, and why."""
    missed = row.get("missed") or {}
    if not missed:
        started = row.get("cached_tokens") is not None
        return "none but the last, which is always computed" if started else show.UNKNOWN
    return miss_text(missed["tokens"], missed["first_token"], missed["reason"])


def phases(row: JSON) -> list[dict[str, Any]]:
    """Spans of an open or finished request, seconds from its arrival."""
    total = row.get("age_seconds", row.get("duration_seconds"))
    if total is None:
        return []
    queued = row.get("queue_seconds")
    first = row.get("time_to_first_token_seconds")
    ends = [("queued", total if queued is None else min(queued, total))]
    if queued is not None and queued < total:
        running = not row.get("generated_tokens")
        ends.append(("prefill", total if running or first is None else min(first, total)))
        if first is not None and first < total:
            ends.append(("decode", total))
    spans, start = [], 0.0
    for name, end in ends:
        if end > start:
            spans.append(
                {"phase": name, "start": start, "end": end, "text": show.duration(end - start)}
            )
            start = end
    return spans


def gantt(spans: Sequence[dict[str, Any]]) -> alt.LayerChart:
    """The spans as one bar with letters and times."""
    names = list(PHASES)
    rows = [{**span, "letter": PHASES[span["phase"]][0]} for span in spans]
    base = alt.Chart(chart.data(rows), height=44 + chart.AXIS_PIXELS + chart.LEGEND_PIXELS).encode(
        x=alt.X("start:Q", axis=alt.Axis(title="seconds since arrival", grid=False, tickCount=6)),
        x2="end:Q",
        tooltip=[alt.Tooltip("phase:N", title=" "), alt.Tooltip("text:N", title="took")],
    )
    drawn: alt.LayerChart = base.mark_bar(height=22, cornerRadius=3).encode(
        color=alt.Color(
            "phase:N",
            scale=alt.Scale(domain=names, range=[PHASES[name][1] for name in names]),
            legend=alt.Legend(title=None, orient="top"),
        )
    ) + base.transform_calculate(middle="(datum.start + datum.end) / 2").mark_text(
        color="white", fontWeight="bold"
    ).encode(x=alt.X("middle:Q"), x2=alt.value(0), text="letter:N")
    return drawn


def percentiles(rows: Sequence[JSON], by: str) -> list[dict[str, Any]]:
    """Finished requests grouped by one field, with the percentiles of what they waited for."""
    groups: dict[str, list[JSON]] = {}
    for row in rows:
        groups.setdefault(str(row.get(by) or "none"), []).append(row)
    return [
        {
            by: name,
            "requests": len(group),
            "bad": show.share(sum(row.get("outcome") in BAD for row in group) / len(group)),
            "first token p50": show.duration(_quantile(group, "time_to_first_token_seconds", 0.5)),
            "first token p95": show.duration(_quantile(group, "time_to_first_token_seconds", 0.95)),
            "duration p95": show.duration(_quantile(group, "duration_seconds", 0.95)),
            "queued p95": show.duration(_quantile(group, "queue_seconds", 0.95)),
            "prompt tokens": show.count(sum(row.get("prompt_tokens") or 0 for row in group)),
            "output tokens": show.count(sum(row.get("generated_tokens") or 0 for row in group)),
        }
        for name, group in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


def cached_tokens(row: JSON) -> int | None:
    """Prompt tokens of a finished request that were found, on any tier."""
    known = [row.get("cached_device_tokens"), row.get("cached_host_tokens")]
    return None if known == [None, None] else sum(each or 0 for each in known)


BAD = ("error", "timeout", "overloaded")


def _quantile(rows: Sequence[JSON], field: str, q: float) -> float | None:
    values = sorted(float(row[field]) for row in rows if row.get(field) is not None)
    if len(values) < 2:
        return float(values[0]) if values else None
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[round(100 * q) - 1]
