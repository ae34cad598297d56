"""Answers about settings as rows of tables, with values as people write them."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from memd.cli.common import print_fields, say, show
from memd.config_words import written


def settings_rows(
    answer: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterator[tuple[str, ...]]:
    """Key, value, where it comes from, and whether it can be changed."""
    for key, value in values.items():
        changes = "live" if key in answer["live"] else "at start"
        yield key, written(key, value), answer["sources"][key]["source"], changes


def print_setting(answer: Mapping[str, Any], key: str, value: Any) -> None:
    """All about one setting."""
    fields: dict[str, object] = {"value": written(key, value)}
    provenance = dict(answer["sources"][key])
    provenance["since"] = when(provenance["since"])
    detail = answer["live"].get(key)
    if detail is None:
        print_fields({**fields, **provenance, "changes": "at the start of the daemon only"})
        return
    fields |= {"default": written(key, detail["default"]), **provenance}
    beneath = detail["beneath"]
    if beneath is not None:
        fields["beneath"] = f"{written(key, beneath['value'])}, {beneath['source']}"
    fields["allowed"] = _allowed(key, detail)
    print_fields({**fields, "meaning": detail["description"]})


def _allowed(key: str, detail: Mapping[str, Any]) -> str:
    low, high = detail["minimum"], detail["maximum"]
    words = list(detail["choices"])
    if low is not None or high is not None:
        bounds = f"from {written(key, low)}" if low is not None else ""
        bounds += f" to {written(key, high)}" if high is not None else ""
        words.append(bounds.strip())
    unit = f" ({detail['unit']})" if detail["unit"] else ""
    return " or ".join(words or [detail["type"]]) + unit


def print_pending(pending: Mapping[str, Any] | None) -> None:
    """What will revert by itself, on stderr."""
    if pending is not None:
        say(
            f"revision {pending['revision']} reverts by itself in {pending['seconds_left']:.0f} s; "
            f"to keep it: memd settings confirm {pending['revision']}"
        )


def differences(answer: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Key, old and new value of each change."""
    for key, change in answer["changes"].items():
        yield key, written(key, change["old"]), written(key, change["new"])


def reload_rows(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """What a reload did to each key that is not as the sources say, or was not."""
    for key, each in results.items():
        if each["result"] == "unchanged":
            continue
        applied = each["result"] == "applied"
        in_force = written(key, each["new" if applied else "old"])
        yield key, each["result"].replace("_", " "), in_force, written(key, each["new"])


def diff_rows(differing: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Key, value in force, what the sources say and which one, and what a restart would give."""
    for key, each in differing.items():
        in_force, said, later = (
            written(key, each[name]) for name in ("in_force", "sources", "after_restart")
        )
        yield key, in_force, said, each["source"], later


_FIGURES = {
    "first token p95": "time_to_first_token_p95_seconds",
    "between tokens p95": "inter_token_latency_p95_seconds",
    "occupied": "occupied_ratio",
    "direct reclaim": "direct_reclaim_ratio",
}


def history_table(
    history: list[dict[str, Any]],
) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Headings, and a row for each revision; figures only where there are any."""
    measured = [_figures(row.get("measured") or {}) for row in history]
    shown = [name for name in _FIGURES if any(row[name] for row in measured)]
    columns = ("revision", "time", "who", "source", "kind", "changes", "state", "reason", *shown)
    rows = [
        (*_history_row(row), *(figures[name] for name in shown))
        for row, figures in zip(history, measured, strict=True)
    ]
    return columns, rows


def _history_row(row: Mapping[str, Any]) -> tuple[object, ...]:
    changes = "; ".join(f"{key} {old} → {new}" for key, old, new in differences(row))
    back = row["taken_back_by"]
    state = row["state"] or "" if back is None else f"taken back by {back}"
    kind = row["kind"] if row["undoes"] is None else f"{row['kind']} of {row['undoes']}"
    return (
        *(row["revision"], when(row["time"]), row["who"], row["source"] or show(None), kind),
        *(changes or "none", state, row["reason"]),
    )


def _figures(measured: Mapping[str, Any]) -> dict[str, str]:
    """Each figure before and after; "" where neither is known."""
    before, after = measured.get("before") or {}, measured.get("after") or {}
    texts = {}
    for name, key in _FIGURES.items():
        pair = before.get(key), after.get(key)
        known = any(value is not None for value in pair)
        texts[name] = " → ".join(_figure(key, value) for value in pair) if known else ""
    return texts


def _figure(key: str, value: float | None) -> str:
    unit = " s" if key.endswith("_seconds") and value is not None else ""
    return f"{show(value if value is None else float(f'{value:.3g}'), key)}{unit}"


def when(seconds: float) -> str:
    """A time of the daemon in this machine's zone."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
