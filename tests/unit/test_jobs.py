"""Jobs: on time, never two at once, and every outcome counted."""

import asyncio
import time

import pytest
from history import until

from memd.errors import MemdError
from memd.jobs import Job, JobRunning, Jobs, JobSkipped


class Book:
    def __init__(self):
        self.rows = []

    def add_event(self, *_):
        """Nothing is done here that needs one."""

    def add_rows(self, name, rows):
        assert name == "job_runs"
        self.rows += [dict(row) for row in rows]


def run(work, every=3600.0, limit=60.0, times=1, clock=time.time):
    """Run a job out of turn. Returns the jobs and the rows kept."""
    book = Book()
    jobs = Jobs([Job("job", every, limit, work)], book, clock)

    async def life():
        for _ in range(times):
            await jobs.run_now("job")

    asyncio.run(life())
    return jobs, book.rows


def of(jobs):
    (entry,) = jobs.describe()
    return entry


def test_a_run_is_described_counted_and_kept():
    async def work():
        await asyncio.sleep(0.01)

    jobs, rows = run(work, clock=lambda: 1000.0)
    entry = of(jobs)
    assert (entry["last_outcome"], entry["last_error"], entry["last_run_at"]) == ("ok", None, 1000)
    assert entry["last_duration_seconds"] >= 0.01
    assert entry["runs"] == {"ok": 1, "error": 0, "missed": 0, "skipped": 0}
    assert entry["next_run_at"] is None  # not started
    assert jobs.run_counts["job", "ok"] == 1
    assert jobs.run_seconds["job"].total >= 0.01
    assert jobs.last_success_at["job"] >= 1000.0
    assert [(row["job"], row["outcome"], row["error"]) for row in rows] == [("job", "ok", None)]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemdError("the disk is full"), "the disk is full"),
        (RuntimeError(), "RuntimeError"),
        (ValueError("x" * 1000), "x" * 500),
    ],
)
def test_a_job_that_raises_has_failed_and_nothing_else_has(error, says, caplog):
    async def work():
        raise error

    jobs, rows = run(work, times=2)
    assert of(jobs)["last_outcome"] == "error"
    assert of(jobs)["last_error"] == says
    assert of(jobs)["runs"]["error"] == 2
    assert "job" not in jobs.last_success_at
    assert [row["error"] for row in rows] == [says, says]
    assert "job job failed" in caplog.text


def test_a_job_that_takes_too_long_is_ended():
    async def work():
        await asyncio.sleep(60)

    jobs, _ = run(work, limit=0.05)
    assert of(jobs)["last_error"] == "it took longer than 0.05 s"


def test_a_job_with_nothing_to_do_is_skipped():
    async def work():
        raise JobSkipped("requests are running")

    jobs, _ = run(work)
    assert (of(jobs)["last_outcome"], of(jobs)["last_error"]) == ("skipped", "requests are running")
    assert jobs.run_seconds["job"].total == 0.0


def test_of_a_frequent_job_failures_and_recoveries_are_kept():
    outcomes = iter([True, True, False, False, True, True])

    async def work():
        if not next(outcomes):
            raise MemdError("no")

    _, rows = run(work, every=15.0, times=6)
    assert [row["outcome"] for row in rows] == ["ok", "error", "error", "ok"]


def test_a_job_is_never_at_work_twice():
    async def life():
        at_work, most = 0, 0
        gate = asyncio.Event()

        async def work():
            nonlocal at_work, most
            at_work += 1
            most = max(most, at_work)
            await gate.wait()
            at_work -= 1

        jobs = Jobs([Job("job", 3600.0, 60.0, work)], Book())
        first = asyncio.create_task(jobs.run_now("job"))
        await asyncio.sleep(0)
        assert of(jobs)["running"]
        with pytest.raises(JobRunning):
            await jobs.run_now("job")
        gate.set()
        assert (await first)["last_outcome"] == "ok"
        assert most == 1

    asyncio.run(life())


def test_an_unknown_job_is_a_key_error():
    async def life():
        with pytest.raises(KeyError):
            await Jobs([], Book()).run_now("job")

    asyncio.run(life())


async def started(jobs, seconds):
    jobs.start()
    await asyncio.sleep(seconds)
    entry = of(jobs)
    await jobs.stop()
    return entry


def test_jobs_run_by_themselves_and_a_long_run_makes_the_next_one_skip():
    runs = []

    async def work():
        runs.append(time.monotonic())
        await asyncio.sleep(1.5 if len(runs) == 1 else 0)

    book = Book()
    jobs = Jobs([Job("job", 1.0, 60.0, work)], book)
    entry = asyncio.run(started(jobs, 3.8))
    assert entry["next_run_at"] > time.time() - 1
    assert entry["runs"]["skipped"] >= 1
    assert entry["runs"]["ok"] >= 2
    assert "the run before is not over" in [row["error"] for row in book.rows]
    assert len(runs) == entry["runs"]["ok"]


def test_runs_that_a_busy_loop_leaves_out_are_missed(caplog):
    async def work():
        """Quick."""

    async def life():
        book = Book()
        jobs = Jobs([Job("job", 1.0, 60.0, work)], book)
        jobs.start()
        await until(lambda: of(jobs)["runs"]["ok"] == 1)
        time.sleep(3.0)  # noqa: ASYNC251 - the loop is held up
        await until(lambda: of(jobs)["runs"]["missed"] >= 2)
        entry = of(jobs)
        await jobs.stop()
        return entry, book.rows

    entry, rows = asyncio.run(life())
    assert entry["runs"]["missed"] >= 2
    assert "runs were missed: the daemon was held up for 3" in caplog.text
    (row,) = (row for row in rows if row["outcome"] == "missed")
    assert row["error"] in caplog.text


def test_after_the_stop_nothing_runs():
    runs = []

    async def work():
        runs.append(1)

    async def life():
        jobs = Jobs([Job("job", 1.0, 60.0, work)], Book())
        jobs.start()
        await jobs.stop()
        await asyncio.sleep(1.5)

    asyncio.run(life())
    assert runs == []


def test_a_clock_that_is_set_back_does_not_stop_the_jobs(caplog):
    runs, back = [], 0.0

    async def work():
        runs.append(1)

    async def life():
        nonlocal back
        job = Job("job", 3600.0, 60.0, work)
        jobs = Jobs([job], Book(), lambda: time.time() - back, watch_seconds=0.1)
        jobs.start()
        await until(lambda: len(runs) == 1)
        back = 7200.0
        await until(lambda: len(runs) == 2)
        await asyncio.sleep(0.5)  # once is enough
        await jobs.stop()

    asyncio.run(life())
    assert len(runs) == 2
    assert "set back by 7200 s" in caplog.text
