"""What became of latency and memory after a change of settings, beside what was before it.

Read from the samples in the database. What a revision changed is known five minutes after it, and
does not change any more; so it is read once and kept.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from memd.settings_history import Revision
from memd.store.errors import StoreError
from memd.store.store import Store
from memd.store.tables import Sample

WINDOW_SECONDS = 300.0  # the alert rules' records look back as far
MAX_REVISIONS = 100  # newest ones that are measured
_AGAIN_SECONDS = 15.0  # a revision that is not over is not read more often
_LATE_SECONDS = 60.0  # after the end of a window, for its last sample

# Quantiles and shares as the alert rules record them: over the five minutes before a sample. The
# occupied ratio is a gauge, whose mean over the same minutes is told.
_RECORDED = {
    "time_to_first_token_p95_seconds": "model:memd_time_to_first_token_seconds:p95_rate5m",
    "inter_token_latency_p95_seconds": "model:memd_inter_token_latency_seconds:p95_rate5m",
    "direct_reclaim_ratio": "gpu:memd_direct_reclaim:ratio_rate5m",
}
_OCCUPIED = "memd_pool_occupied_ratio"

Points = Sequence[tuple[float, str, float]]  # Unix seconds, metric, value; ascending in time


class SettingsEffects:
    """Measures revisions.

    Args:
        store: Holds the samples.
        sample_seconds: How often they are taken.
        clock: Unix seconds.
    """

    def __init__(
        self, store: Store, sample_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._late_seconds = max(_LATE_SECONDS, 2 * sample_seconds)
        self._clock = clock
        self._known: dict[int, dict[str, Any]] = {}
        self._read_at: dict[int, float] = {}

    async def of(self, rows: Iterable[Revision]) -> dict[int, dict[str, Any]]:
        """Figures before and after each revision; a revision that cannot be measured is left out.

        Returns:
            By revision: `window_seconds`, `before` and `after`, each with `occupied_ratio`,
            `direct_reclaim_ratio` and the 95th percentiles `time_to_first_token_p95_seconds` and
            `inter_token_latency_p95_seconds`. A figure is None where nothing was measured, as
            without traffic; `after` is None until the window is over.
        """
        now = self._clock()
        wanted = [row for row in rows if row.kind != "start"][-MAX_REVISIONS:]
        due = [row for row in wanted if now >= self._read_at.get(row.revision, 0.0)]
        if due:
            try:
                read = await self._store.query(lambda session: self._read(session, due, now))
            except StoreError:
                read = {}  # told by the state of the history; settings are shown all the same
            for row in due:
                if row.revision in read:
                    self._known[row.revision] = read[row.revision]
                    over = now > row.time + WINDOW_SECONDS + self._late_seconds
                    self._read_at[row.revision] = float("inf") if over else now + _AGAIN_SECONDS
            self._forget()
        return {
            row.revision: self._known[row.revision] for row in wanted if row.revision in self._known
        }

    def _read(self, session: Session, rows: list[Revision], now: float) -> dict[int, Any]:
        columns = Sample.__table__.c
        found = {}
        for row in rows:
            first, last = row.time - WINDOW_SECONDS, row.time + WINDOW_SECONDS + self._late_seconds
            query = (
                select(columns.time, columns.metric, columns.value)
                .where(columns.metric.in_([*_RECORDED.values(), _OCCUPIED]))
                .where(columns.time >= first, columns.time <= last)
                .order_by(columns.time)
            )
            points = [tuple(each) for each in session.execute(query)]
            found[row.revision] = measured(points, row.time, now, self._late_seconds)
        return found

    def _forget(self) -> None:
        for revision in sorted(self._known)[: -10 * MAX_REVISIONS]:
            del self._known[revision], self._read_at[revision]


def measured(points: Points, at: float, now: float, late_seconds: float) -> dict[str, Any]:
    """Figures of the windows before and after a moment.

    Args:
        points: Samples of both.
        at: The moment, Unix seconds.
        now: Unix seconds; until the window after is over there is none.
        late_seconds: How late a window's last sample may come.
    """
    end = at + WINDOW_SECONDS
    before = _figures(points, at - WINDOW_SECONDS, at, lambda t: at - late_seconds <= t <= at, -1)
    after = None
    if now >= end:
        after = _figures(points, at, end, lambda t: end <= t <= end + late_seconds, 0)
    return {"window_seconds": WINDOW_SECONDS, "before": before, "after": after}


def _figures(
    points: Points, start: float, end: float, at_end: Callable[[float], bool], place: int
) -> dict[str, float | None]:
    """Of one window; records are read at its end, where they cover just the window."""
    found: dict[str, float | None] = {}
    for name, metric in _RECORDED.items():
        times = sorted({t for t, each, _ in points if each == metric and at_end(t)})
        values = [v for t, each, v in points if times and each == metric and t == times[place]]
        found[name] = max(values, default=None)
    occupied = [value for t, each, value in points if each == _OCCUPIED and start <= t < end]
    found["occupied_ratio"] = fmean(occupied) if occupied else None
    return found
