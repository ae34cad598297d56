"""What the settings routes answer: settings with their provenance, history, effect of a change."""

import math
from collections.abc import Container, Mapping
from dataclasses import asdict
from typing import Any

from memd.config import LIVE_KEYS, Settings, dump, flatten, leaves
from memd.config_words import allowed
from memd.engine.snapshot_types import EngineSnapshot, Histogram
from memd.errors import SettingsError
from memd.pool_size import limit_pages
from memd.settings import LiveSettings
from memd.settings_history import Revision, taken_back
from memd.settings_state import Pending

NO_PREDICTION = "the simulator that replays recorded traffic is not part of this version"


def settings_view(live: LiveSettings, now: float) -> dict[str, Any]:
    """The tree in force, and where each value comes from.

    Args:
        live: The settings.
        now: Monotonic seconds.
    """
    file, reload = live.sources.file, live.last_reload
    return {
        "revision": live.revision,
        "settings": dump(live.current),
        "sources": {key: _provenance(live, key) for key in leaves()},
        "live": {key: _live_key(live, key) for key in leaves() if key in LIVE_KEYS},
        "pending": _pending(live.state.pending, now),
        "file": None if file is None else str(file),
        "last_reload": {"at": reload.time, "ok": reload.error is None, "error": reload.error},
    }


def _provenance(live: LiveSettings, key: str) -> dict[str, Any]:
    """default, file, environment or flag, or live: then who, why, and in which revision."""
    override = live.state.layers.in_force.get(key)
    if override is None:
        return {"source": live.origins[key], "since": live.since[key]}
    return {
        "source": "live",
        "since": override.time,
        "who": override.who,
        "reason": override.reason,
        "revision": override.revision,
        "persisted": live.state.layers.saved.get(key) == override,
    }


def _live_key(live: LiveSettings, key: str) -> dict[str, Any]:
    """For a page on which it is changed."""
    state = live.state
    beneath = {"source": live.origins[key], "value": state.base[key]}
    return {
        "value": flatten(dump(live.current))[key],
        "default": flatten(dump(Settings()))[key],
        "description": leaves()[key].description or "",
        **allowed(key),
        **_provenance(live, key),
        "beneath": beneath if key in state.layers.in_force else None,
    }


def _pending(pending: Pending | None, now: float) -> dict[str, Any] | None:
    if pending is None:
        return None
    row = pending.row
    return {
        "revision": row.revision,
        "confirm_by": row.confirm_by,
        "seconds_left": round(max(0.0, pending.deadline - now), 3),
        "changes": row.changes,
        "who": row.who,
        "reason": row.reason,
    }


def history_view(live: LiveSettings, rows: list[Revision]) -> list[dict[str, Any]]:
    """Rows of the history, and what has become of each since.

    `state`: `in force`; `superseded`, when later changes hold for all its keys; `taken back` by the
    revision `taken_back_by`; `unconfirmed`; `ended`, with a restart. Only changes have one.
    """
    state = live.state
    gone = taken_back(state.rows)
    holding = {override.revision for override in state.layers.in_force.values()}

    def outcome(row: Revision) -> str | None:
        if row.kind != "change":
            return None
        if row.revision in gone:
            return "taken back"
        if state.pending is not None and state.pending.row.revision == row.revision:
            return "unconfirmed"
        resets = row.revision >= state.life.start and any(
            pair.get("reset") and key not in state.layers.in_force
            for key, pair in row.changes.items()
        )
        if row.revision in holding or resets:
            return "in force"
        return "ended" if row.revision < state.life.start else "superseded"

    return [
        {**asdict(row), "state": outcome(row), "taken_back_by": gone.get(row.revision)}
        for row in rows
    ]


def limit_pages_of(layout: Mapping[str, Any], proposed: Settings) -> int:
    """Pages that the proposed `memory.limit` comes to.

    Args:
        layout: `Ready.pool`.

    Raises:
        SettingsError: none, more than its address range holds, or nothing may be changed.
    """
    if not layout["elastic"]:
        raise SettingsError({"memory.limit": f"needs a restart: {layout['elastic_reason']}"})
    sizes = layout["page_tokens"], layout["page_bytes"], layout["block_bytes"]
    pages = limit_pages(proposed.memory.limit, layout["limit_base_bytes"], *sizes)
    if pages > layout["most_pages"]:
        most = f"the address range of the pool holds {layout['most_pages']} until a restart"
        raise SettingsError({"memory.limit": f"it comes to {pages} pages, {most}"})
    return pages


def effect_view(
    snapshot: EngineSnapshot,
    layout: Mapping[str, Any],
    proposed: Settings,
    changed: Container[str],
) -> dict[str, Any]:
    """What other settings would do at once.

    Args:
        layout: `Ready.pool`.
        changed: Keys that differ.

    Returns:
        `occupied_ratio` now and after, `reclaimed_pages` in between: what background reclaim takes,
        bounded by what is not in use. `reclaim_seconds`: how long that takes at the pace of the
        steps measured so far; null: none was. `host_evicted_pages`: what the host tier would drop.
        `limit_pages`: what the pool may hold then; `given_back_bytes`: at least so much of its
        memory goes back to the device, when what is in its way is gone.

    Raises:
        SettingsError: the limit cannot be put in force.
    """
    pool, marks = snapshot.pool, proposed.memory.watermark
    limited = "memory.limit" in changed
    limit_pages = limit_pages_of(layout, proposed) if limited else snapshot.elastic.limit_pages
    per_block = layout["block_bytes"] // layout["page_bytes"]
    # Pages are places, of which a packed block has more.
    capacity = limit_pages
    if pool.packed_blocks:
        capacity += pool.packed_blocks * (layout["packed_pages_per_block"] - per_block)
    occupied = pool.capacity_pages - pool.free_pages
    reclaims = occupied >= marks.high * capacity or (
        pool.reclaiming and occupied > marks.low * capacity
    )
    surplus = occupied - int(marks.low * capacity)
    blocks = -(-limit_pages // per_block)
    reclaimed = min(surplus, pool.cached_pages) if reclaims else 0
    limit = proposed.memory.host.limit
    kept = pool.host_used_pages if limit == "auto" else limit // layout["page_bytes"]
    return {
        "occupied_ratio": occupied / pool.capacity_pages,
        "occupied_ratio_after": (occupied - reclaimed) / max(capacity, occupied - reclaimed),
        "limit_pages": limit_pages,
        "given_back_bytes": max(0, pool.committed_blocks - blocks) * layout["block_bytes"],
        "reclaimed_pages": reclaimed,
        "reclaim_seconds": _reclaim_seconds(snapshot, proposed, reclaimed),
        "host_evicted_pages": max(0, pool.host_used_pages - kept),
    }


def _reclaim_seconds(
    snapshot: EngineSnapshot, proposed: Settings, reclaimed_pages: int
) -> float | None:
    """Background reclaim takes its share once a step: of the model, or of an idle engine."""
    if reclaimed_pages == 0:
        return 0.0
    pages = proposed.memory.reclaim_pages_per_step
    if pages == "auto":
        in_force = snapshot.settings.get("memory.reclaim_pages_per_step")
        if not in_force:
            return None
        pages = int(in_force)
    working = list(snapshot.step_seconds.values())
    measured = working if snapshot.running else [snapshot.pool.eviction_pass_seconds]
    step = _mean(measured)
    return None if step is None else round(math.ceil(reclaimed_pages / pages) * step, 6)


def _mean(histograms: list[Histogram]) -> float | None:
    count = sum(sum(each.counts) for each in histograms)
    return sum(each.total for each in histograms) / count if count else None
