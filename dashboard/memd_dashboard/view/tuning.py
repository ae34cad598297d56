"""Live settings, what a change would do, and what was changed before."""

from collections.abc import Mapping, Sequence
from datetime import tzinfo
from typing import Any

from memd_dashboard import show
from memd_dashboard.snapshot import JSON

FIGURES = {
    "first token": "time_to_first_token_p95_seconds",
    "between tokens": "inter_token_latency_p95_seconds",
    "occupied": "occupied_ratio",
    "direct reclaim": "direct_reclaim_ratio",
}
REVERTS = {"no": None, "in 5 minutes": 300, "in 15 minutes": 900, "in 1 hour": 3600}


def live(settings: JSON) -> dict[str, JSON]:
    """The live settings by key."""
    found: dict[str, JSON] = settings.get("live") or {}
    return found


def rows(settings: JSON, now: float) -> list[dict[str, Any]]:
    """One row for each live setting."""
    return [
        {
            "setting": key,
            "value": show.setting(entry.get("value"), entry.get("unit")),
            "default": show.setting(entry.get("default"), entry.get("unit")),
            "allowed": allowed(entry),
            "source": source(entry),
            "since": show.ago(entry["since"], now) if entry.get("since") else "",
            "meaning": entry.get("description") or "",
        }
        for key, entry in sorted(live(settings).items())
    ]


def source(entry: JSON) -> str:
    """Where a value comes from: default, file, environment, flag, or live and who."""
    found = str(entry.get("source") or "")
    return f"{found}: {entry['who']}, revision {entry['revision']}" if entry.get("who") else found


_OPEN = {"bytes": "a size, such as 24GB", "seconds": "a time, such as 30s"}
_TEXT = {"bytes": "such as 80% or 24GB"}  # what is no number, but has a unit


def allowed(entry: JSON) -> str:
    """Which values are allowed, in words."""
    unit = entry.get("unit")
    low, high = entry.get("minimum"), entry.get("maximum")
    words = list(entry.get("choices") or ())
    if low is not None and high is not None:
        words.append(f"{show.setting(low, unit)} to {show.setting(high, unit)}")
    elif low and unit in _OPEN:
        words.append(f"at least {show.setting(low, unit)}")
    elif entry.get("type") in ("number", "integer"):
        words.append(_OPEN.get(unit or "") or (f"at least {low:,}" if low else "0 or more"))
    return " or ".join(words) or _TEXT.get(unit or "", "")


def editable(settings: JSON) -> list[str]:
    """Keys that are one value; what is a list has a page of its own."""
    return sorted(
        key for key, entry in live(settings).items() if not isinstance(entry.get("value"), list)
    )


def units(settings: JSON) -> dict[str, str | None]:
    """The unit of each live setting."""
    return {key: entry.get("unit") for key, entry in live(settings).items()}


def typed(entry: JSON) -> str:
    """A value as one would type it, to start an edit from."""
    value, unit = entry.get("value"), entry.get("unit")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if unit == "share of one":
            return f"{100 * value:g}%"
        if unit == "bytes":
            return f"{value / 2**20:g}MiB" if value % 2**20 == 0 else f"{value:d}B"
        if unit == "seconds":
            return f"{value:g}s"
    return "" if value is None else str(value)


def parse(text: str) -> Any:
    """What was typed, for the daemon: a whole number as a number, `none` as null, else the text."""
    text = text.strip()
    if text.lower() in ("none", "null"):
        return None
    return int(text) if text.lstrip("-").isdigit() else text


def differences(changes: Mapping[str, Any], units: Mapping[str, str | None]) -> str:
    """Old and new values, in one line."""
    return ", ".join(
        f"{key}: {show.setting(pair.get('old'), units.get(key))} → "
        f"{show.setting(pair.get('new'), units.get(key))}"
        for key, pair in changes.items()
    )


def new_values(changes: Mapping[str, Any], units: Mapping[str, str | None]) -> str:
    """What would be in force, without what it is of."""
    return ", ".join(show.setting(pair.get("new"), units.get(key)) for key, pair in changes.items())


def beside_sources(diff: JSON, units: Mapping[str, str | None]) -> list[JSON]:
    """Where what is in force is not what file, environment and flags say now."""
    return [
        {
            "setting": key,
            "in force": show.setting(each.get("in_force"), units.get(key)),
            "source says": f"{show.setting(each.get('sources'), units.get(key))} "
            f"({each.get('source')})",
            "after a restart": show.setting(each.get("after_restart"), units.get(key)),
        }
        for key, each in (diff.get("differences") or {}).items()
    ]


def effect(preview: JSON, page_bytes: int, units: Mapping[str, str | None]) -> list[str]:
    """What a change does, in sentences."""
    if not preview.get("changes"):
        return ["Nothing would change: this is the value in force."]
    sentences = [differences(preview["changes"], units)]
    now = preview.get("effect") or {}
    if now.get("reclaimed_pages"):
        pages = now["reclaimed_pages"]
        took = now.get("reclaim_seconds")
        sentences.append(
            f"At once: {show.count(pages)} cached pages ({show.size(pages * page_bytes)}) are "
            f"evicted; the pool goes from {show.share(now.get('occupied_ratio'))} to "
            f"{show.share(now.get('occupied_ratio_after'))} occupied"
            + (f", in about {show.duration(took)}." if took is not None else ".")
        )
    elif now:
        sentences.append(
            "At once: nothing is evicted; the pool stays "
            f"{show.share(now.get('occupied_ratio'))} occupied."
        )
    if now.get("given_back_bytes"):
        sentences.append(
            f"The pool gives at least {show.size(now['given_back_bytes'])} back to the device, as "
            "soon as requests, pins and moves of pages let it."
        )
    if now.get("host_evicted_pages"):
        dropped = now["host_evicted_pages"]
        sentences.append(f"The host tier drops {show.count(dropped)} pages.")
    if preview.get("predicted") is None and preview.get("predicted_reason"):
        sentences.append(f"Over time: not known; {preview['predicted_reason']}.")
    return sentences


def problems(preview: JSON) -> list[str]:
    """Why a change is refused, a sentence for each key."""
    return [f"{key}: {why}" for key, why in (preview.get("problems") or {}).items()]


def audit(
    history: Sequence[JSON], zone: tzinfo | None, units: Mapping[str, str | None]
) -> list[dict[str, Any]]:
    """Revisions, newest first."""
    return [
        {
            "revision": row["revision"],
            "when": show.date(row.get("time"), zone),
            "who": row.get("who"),
            "kind": kind(row),
            "change": differences(row.get("changes") or {}, units) or "nothing",
            **{name: pair(row.get("measured"), key) for name, key in FIGURES.items()},
            "reason": row.get("reason"),
            "through": row.get("source") or "",
            "now": row.get("state") or "",
        }
        for row in sorted(history, key=lambda row: -row["revision"])
    ]


def pair(measured: JSON | None, key: str) -> str:
    """A figure of the minutes before a change and of those after it."""
    given = measured or {}
    values = [(given.get(side) or {}).get(key) for side in ("before", "after")]
    if values == [None, None]:
        return show.UNKNOWN
    text = show.duration if key.endswith("_seconds") else show.share
    return " → ".join(text(value) for value in values)


def kind(row: JSON) -> str:
    """Of a revision, with what it takes back."""
    undone = row.get("undoes")
    return f"{row.get('kind')} of {undone}" if undone is not None else str(row.get("kind"))


def undoable(history: Sequence[JSON]) -> list[JSON]:
    """Changes that are in effect, newest first."""
    return [
        row
        for row in sorted(history, key=lambda row: -row["revision"])
        if row.get("state") in ("in force", "unconfirmed")
    ]


def pending(settings: JSON) -> tuple[int, str] | None:
    """The revision that will revert by itself, and when, in words; None: there is none."""
    waiting = settings.get("pending")
    if not waiting:
        return None
    return waiting["revision"], f"in {show.duration(waiting['seconds_left'])}"
