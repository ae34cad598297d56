"""The daemon's periodic work: each job runs every so often, never twice at once, and is counted.

A job that raises has failed; the next run comes as planned. Jobs are coroutines on the event loop
and move what blocks to threads.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from apscheduler.schedulers.asyncio import AsyncIOScheduler

from memd.alerting import Kept
from memd.errors import MemdError
from memd.histogram import JOB, HistogramCounts

Outcome = Literal["ok", "error", "missed", "skipped"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "error", "missed", "skipped")
_FREQUENT_SECONDS = 60.0  # of jobs that come more often only failures and recoveries are kept
_ERROR_CHARACTERS = 500
_log = logging.getLogger(__name__)


class JobSkipped(Exception):
    """Raised by a job that has nothing to do now, such as an audit while requests run."""


class JobRunning(MemdError):
    """The job is at work already."""


@dataclass(frozen=True)
class Job:
    """Something done every so often.

    Args:
        name: Label value and route.
        every_seconds: Between two starts.
        limit_seconds: Longest run.
        work: Done once a run.
    """

    name: str
    every_seconds: float
    limit_seconds: float
    work: Callable[[], Awaitable[object]]


@dataclass
class _Record:
    """What is known of a job's runs."""

    running: bool = False
    called_at: float | None = None  # monotonic; by the schedule
    started_at: float | None = None
    outcome: Outcome | None = None
    duration_seconds: float | None = None
    error: str | None = None


class Jobs:
    """Runs jobs, on the event loop.

    Args:
        jobs: All there are.
        store: Gets the runs.
        clock: Unix seconds.
        watch_seconds: How often it is looked whether the clock was set back.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        store: Kept,
        clock: Callable[[], float] = time.time,
        watch_seconds: float = 10.0,
    ) -> None:
        self._jobs = {job.name: job for job in jobs}
        self._store = store
        self._clock = clock
        self._watch_seconds = watch_seconds
        self._watch: asyncio.Task[None] | None = None
        self._scheduler = AsyncIOScheduler(timezone=UTC)
        self._records = {name: _Record() for name in self._jobs}
        self.run_counts: dict[tuple[str, str], int] = {
            (name, outcome): 0 for name in self._jobs for outcome in OUTCOMES
        }
        self.run_seconds = {name: HistogramCounts(JOB) for name in self._jobs}
        self.last_success_at: dict[str, float] = {}

    def start(self) -> None:
        """Begin; each job runs for the first time after a second, one shortly after the other."""
        for index, job in enumerate(self._jobs.values()):
            self._scheduler.add_job(
                self._run_scheduled,
                "interval",
                (job,),
                id=job.name,
                seconds=job.every_seconds,
                next_run_time=datetime.now(UTC) + timedelta(seconds=1 + 0.2 * index),
                coalesce=True,
                max_instances=2,  # a second one finds the first at work, and is counted as skipped
                misfire_grace_time=None,  # late is better than never; what was missed is counted
            )
        # Failures are counted and logged here, in words of memd.
        logging.getLogger("apscheduler").setLevel(logging.CRITICAL)
        self._scheduler.start()
        self._watch = asyncio.create_task(self._watch_clock())

    async def stop(self) -> None:
        """End; a run under way is cancelled."""
        if self._watch is not None:
            self._watch.cancel()
            self._scheduler.shutdown(wait=False)
            await asyncio.gather(self._watch, return_exceptions=True)

    async def run_now(self, name: str) -> dict[str, Any]:
        """Run a job out of turn and wait for it. Returns its entry of `describe`.

        Raises:
            KeyError: there is no such job.
            JobRunning: it is at work.
        """
        job = self._jobs[name]
        if self._records[name].running:
            raise JobRunning(f"the job {name} is running")
        await self._run(job)
        return self._entry(job)

    def describe(self) -> list[dict[str, Any]]:
        """All jobs, with their latest run and the next one. Times are Unix seconds."""
        return [self._entry(job) for job in self._jobs.values()]

    async def _run_scheduled(self, job: Job) -> None:
        self._count_missed(job)
        if self._records[job.name].running:
            self._finish(job, self._clock(), "skipped", None, "the run before is not over")
            return
        await self._run(job)

    async def _run(self, job: Job) -> None:
        self._records[job.name].running = True
        started_at, begun = self._clock(), time.monotonic()
        outcome: Outcome = "ok"
        error = None
        try:
            async with asyncio.timeout(job.limit_seconds):
                await job.work()
        except JobSkipped as reason:
            outcome, error = "skipped", str(reason)
        except TimeoutError:
            outcome, error = "error", f"it took longer than {job.limit_seconds:g} s"
        except Exception as fault:
            outcome, error = "error", (str(fault) or type(fault).__name__)[:_ERROR_CHARACTERS]
            level = logging.WARNING if isinstance(fault, MemdError) else logging.ERROR
            _log.log(level, "job %s failed: %s", job.name, error, exc_info=level == logging.ERROR)
        finally:
            self._records[job.name].running = False
        duration = time.monotonic() - begun
        if outcome in ("ok", "error"):
            self.run_seconds[job.name].observe(duration)
        self._finish(job, started_at, outcome, duration, error)

    def _finish(
        self, job: Job, at: float, outcome: Outcome, duration: float | None, error: str | None
    ) -> None:
        record = self._records[job.name]
        news = job.every_seconds >= _FREQUENT_SECONDS or outcome != record.outcome
        record.started_at, record.outcome = at, outcome
        record.duration_seconds, record.error = duration, error
        self.run_counts[job.name, outcome] += 1
        if outcome == "ok":
            self.last_success_at[job.name] = at + (duration or 0.0)
        if news or outcome == "error":
            row = {"time": at, "job": job.name, "outcome": outcome}
            self._store.add_rows(
                "job_runs", [{**row, "duration_seconds": duration, "error": error}]
            )

    async def _watch_clock(self) -> None:
        """The schedule is by the clock on the wall: set back an hour, nothing would run for one."""
        lead = self._clock() - time.monotonic()
        while True:
            await asyncio.sleep(self._watch_seconds)
            before, lead = lead, self._clock() - time.monotonic()
            if lead < before - 1.0:
                _log.warning("the clock was set back by %.0f s: all jobs run now", before - lead)
                for name in self._jobs:
                    self._scheduler.modify_job(name, next_run_time=datetime.now(UTC))

    def _count_missed(self, job: Job) -> None:
        """Runs that a held-up event loop has left out: only the latest of them is made up for."""
        record, now = self._records[job.name], time.monotonic()
        before, record.called_at = record.called_at, now
        if before is None:
            return
        missed = round((now - before) / job.every_seconds) - 1
        if missed > 0:
            why = f"{missed} runs were missed: the daemon was held up for {now - before:.1f} s"
            _log.warning("job %s: %s", job.name, why)
            self._finish(job, self._clock(), "missed", None, why)
            self.run_counts[job.name, "missed"] += missed - 1

    def _entry(self, job: Job) -> dict[str, Any]:
        record, planned = self._records[job.name], self._scheduler.get_job(job.name)
        next_run = planned.next_run_time if planned is not None else None
        return {
            "name": job.name,
            "every_seconds": job.every_seconds,
            "running": record.running,
            "last_run_at": record.started_at,
            "last_outcome": record.outcome,
            "last_duration_seconds": record.duration_seconds,
            "last_error": record.error,
            "next_run_at": next_run.timestamp() if next_run is not None else None,
            "runs": {each: self.run_counts[job.name, each] for each in OUTCOMES},
        }
