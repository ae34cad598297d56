"""Alerts, their history, silences and channels."""

from collections.abc import Sequence
from datetime import tzinfo
from html import escape
from typing import Any

from memd_dashboard import palette, show
from memd_dashboard.snapshot import JSON

_COMMON = ("alertname", "severity", "instance")
_ORDER = {"firing": 0, "pending": 1, "resolved": 2}
DURATIONS = {
    "30 minutes": 1800,
    "2 hours": 7200,
    "8 hours": 28800,
    "1 day": 86400,
    "1 week": 604800,
}


def runbook(alert: JSON) -> str:
    """Where it says what to do; a link where it is an address; HTML."""
    where = str(alert.get("runbook_url") or "")
    if where.startswith(("http://", "https://")):
        return f' · <a href="{escape(where)}" target="_blank" rel="noopener">runbook</a>'
    return f" · runbook: {escape(where)}" if where else ""


def ordered(alerts: Sequence[JSON]) -> list[JSON]:
    """Firing first, then pending; silenced ones after the others, the newest first."""
    return sorted(
        alerts,
        key=lambda row: (
            _ORDER.get(str(row.get("state")), 9),
            bool(row.get("silenced")),
            -(row.get("fired_at") or row.get("since") or 0),
        ),
    )


def firing(alerts: Sequence[JSON]) -> list[JSON]:
    """Those that fire and are not silenced."""
    return [
        row for row in ordered(alerts) if row.get("state") == "firing" and not row.get("silenced")
    ]


def title(alert: JSON) -> str:
    """Name and the labels that tell it from others of the same rule."""
    labels = {k: v for k, v in (alert.get("labels") or {}).items() if k not in _COMMON}
    text = ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return f"{alert.get('name')} ({text})" if text else str(alert.get("name"))


def colour(alert: JSON) -> str:
    """By state and severity."""
    if alert.get("silenced") or alert.get("state") == "resolved":
        return palette.NEUTRAL
    if alert.get("state") == "pending":
        return palette.WARNING
    return palette.BAD if alert.get("severity") == "page" else palette.WARNING


def state_text(alert: JSON, now: float) -> str:
    """State, and since when."""
    state, since = str(alert.get("state")), alert.get("fired_at") or alert.get("since")
    if state == "resolved":
        text = f"resolved {show.ago(alert.get('resolved_at'), now)}"
    else:
        text = f"{state} for {show.duration(now - since)}" if since else state
    return f"{text}, silenced" if alert.get("silenced") else text


def line(alert: JSON, now: float) -> str:
    """Name, state, what it means and where it says what to do; HTML."""
    unit = alert.get("unit")
    return (
        f'<div><i class="memd-dot" style="background:{colour(alert)}"></i>'
        f"<b>{escape(title(alert))}</b> · {escape(str(alert.get('severity')))} · "
        f"{escape(state_text(alert, now))}</div>"
        f'<div class="memd-note">{escape(str(alert.get("summary") or ""))}. Now '
        f"{figure(alert.get('value'), unit)}, limit {figure(alert.get('threshold'), unit)}"
        f"{runbook(alert)}</div>"
    )


def figure(value: float | None, unit: str | None) -> str:
    """What a rule looks at, with its unit as the rule file names it; or unknown."""
    if value is None:
        return show.UNKNOWN
    match unit:
        case "ratio":
            return show.share(value)
        case "seconds":
            return show.duration(value)
        case "bytes":
            return show.size(value)
        case "per_second":
            return f"{value:.4g} a second"
        case _:
            return f"{value:.4g}"


def incidents(rows: Sequence[JSON], zone: tzinfo | None, now: float) -> list[dict[str, Any]]:
    """Past and present incidents, newest first."""
    return [
        {
            "alert": title(row),
            "severity": row.get("severity"),
            "began": show.date(row.get("fired_at") or row.get("since"), zone),
            "ended": show.date(row["resolved_at"], zone)
            if row.get("resolved_at")
            else "still firing",
            "lasted": show.duration(_lasted(row, now)),
            "peak": figure(row.get("peak"), row.get("unit")),
            "limit": figure(row.get("threshold"), row.get("unit")),
        }
        for row in rows
    ]


def _lasted(row: JSON, now: float) -> float | None:
    if row.get("duration_seconds") is not None:
        return float(row["duration_seconds"])
    return now - row["fired_at"] if row.get("fired_at") else None


def silences(rows: Sequence[JSON], zone: tzinfo | None) -> list[dict[str, Any]]:
    """Silences: what they match, until when, why."""
    return [
        {
            "id": row.get("id"),
            "matches": matcher_text(row.get("matchers")),
            "ends": show.date(row.get("ends_at"), zone),
            "author": row.get("author"),
            "reason": row.get("reason"),
        }
        for row in rows
    ]


def matcher_text(matchers: Any) -> str:
    """Matchers in one line."""
    if isinstance(matchers, dict):
        return ", ".join(f"{key}={value}" for key, value in sorted(matchers.items()))
    return ", ".join(map(str, matchers or ()))


def matchers(alert: JSON) -> dict[str, str]:
    """What picks out just this alert."""
    return {"alertname": str(alert.get("name")), **(alert.get("labels") or {})}


def rules(rows: Sequence[JSON]) -> list[dict[str, Any]]:
    """Rules in words, with the worst value that each sees now."""
    return [
        {
            "rule": row.get("name"),
            "state": row.get("state"),
            "severity": row.get("severity"),
            "fires when": row.get("summary"),
            "for": show.duration(row.get("for_seconds")),
            **_worst(row),
            "evaluated by": ", ".join(row.get("evaluated_by") or ()),
        }
        for row in rows
    ]


def _worst(row: JSON) -> dict[str, str]:
    """The value nearest to its limit, and the limit."""
    values = [each for each in row.get("values") or () if each.get("value") is not None]
    if not values:
        return {"now": show.UNKNOWN, "limit": show.UNKNOWN}
    above = row.get("direction") != "below"
    worst = (max if above else min)(values, key=lambda each: each["value"])
    sign, threshold = ">" if above else "<", worst.get("threshold")
    limit = f"{sign} {figure(threshold, row.get('unit'))}"
    past = threshold is not None and (
        worst["value"] > threshold if above else worst["value"] < threshold
    )
    if past and worst.get("met") is False:
        limit += ", but another condition is not met"
    return {"now": figure(worst["value"], row.get("unit")), "limit": limit}


def channels(rows: Sequence[JSON], now: float) -> list[dict[str, Any]]:
    """Channels and how their notifications went."""
    return [
        {
            "channel": row.get("name"),
            "kind": row.get("kind") or "",
            "severities": ", ".join(row.get("severities") or ()),
            "last sent": show.ago(row.get("last_sent_at"), now),
            **{each: row.get(each) for each in ("sent", "failed", "suppressed")},
            "last error": row.get("last_error") or "",
        }
        for row in rows
    ]
