"""Jobs, events and the history database."""

from collections.abc import Sequence
from datetime import tzinfo
from typing import Any

from memd_dashboard import show
from memd_dashboard.markup import Card
from memd_dashboard.scrape import Window
from memd_dashboard.snapshot import JSON


def table(jobs: Sequence[JSON], now: float) -> list[dict[str, Any]]:
    """One row for each job."""
    return [
        {
            "job": job.get("name"),
            "every": show.duration(job.get("every_seconds")),
            "last run": show.ago(job.get("last_run_at"), now),
            "outcome": job.get("last_outcome") or show.UNKNOWN,
            "took": show.duration(job.get("last_duration_seconds")),
            "next run": next_run(job, now),
            **{
                name: (job.get("runs") or {}).get(name)
                for name in ("ok", "error", "missed", "skipped")
            },
            "last error": job.get("last_error") or "",
        }
        for job in jobs
    ]


def next_run(job: JSON, now: float) -> str:
    """When a job runs next, in words."""
    at = job.get("next_run_at")
    if at is None:
        return show.UNKNOWN
    return f"in {show.duration(at - now)}" if at > now else "due"


def events(rows: Sequence[JSON], zone: tzinfo | None, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Events, newest first, of these kinds or of all."""
    return [
        {
            "when": show.date(row.get("time"), zone),
            "kind": row.get("kind"),
            "what": row.get("message"),
        }
        for row in sorted(rows, key=lambda row: -(row.get("time") or 0))
        if not kinds or row.get("kind") in kinds
    ]


def database(window: Window) -> list[Card]:
    """Figures of the history database."""
    return [
        Card("Database", show.size(window.last("memd_history_database_bytes")), "Size on disk."),
        Card(
            "Rows waiting",
            show.count(window.last("memd_history_queue_rows")),
            "Written in batches; a full queue drops rows, and never slows serving.",
        ),
        Card(
            "Rows written",
            show.count(window.last("memd_history_rows_total", outcome="written")),
            "Since the start.",
        ),
        Card(
            "Rows dropped",
            show.count(window.last("memd_history_rows_total", outcome="dropped")),
            "Since the start: the database was slow, full or gone.",
        ),
    ]
