"""The database of a real daemon: locked, gone, of a killed one; and one daemon a directory."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from kills import engine_process, kill_engine, wait_for_engine
from served import Daemon, serving
from starving import starved_seconds
from tiny import write_model

pytestmark = pytest.mark.slow

SETTINGS = ("engine.device=cpu", "memory.limit=16384 tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def kinds(daemon: Daemon) -> list[str]:
    """Of all events, oldest first."""
    events = daemon.http.get("/admin/v1/events", params={"limit": 1000}).json()["events"]
    return [event["kind"] for event in reversed(events)]


def kept(daemon: Daemon) -> int:
    """Finished requests in the database."""
    query = {"limit": 10_000}
    return len(daemon.http.get("/admin/v1/history/requests", params=query).json()["requests"])


def completions(daemon: Daemon, seconds: float) -> int:
    """How many requests are answered one after the other in so many seconds.

    Without those for which the client, the daemon or the engine got no core.
    """
    pids = daemon.process.pid, engine_process(daemon)
    count, end = 0, time.monotonic() - starved_seconds(*pids) + seconds
    while time.monotonic() - starved_seconds(*pids) < end:
        daemon.complete("hello", max_tokens=8, ignore_eos=True)
        count += 1
    return count


def test_c128_a_second_daemon_is_refused_and_a_killed_one_is_succeeded(model, tmp_path):
    command = [sys.executable, "-m", "memd.cli", "serve", "--model", str(model), "--port", "0"]
    command += ["--state-dir", str(tmp_path)]
    killed = -signal.SIGKILL
    with serving(tmp_path, str(model), *SETTINGS, exit_code=killed) as first:
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 1
        assert f"in use by the daemon with pid {first.process.pid}" in second.stderr
        first.complete("hello", max_tokens=4)
        first.wait_until(lambda: kept(first) == 1, 60, "the request is kept")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(60)
    with serving(tmp_path, str(model), *SETTINGS) as next_one:
        next_one.wait_until(lambda: kinds(next_one).count("daemon_start") == 2, 60, "both starts")
        assert "daemon_stop" not in kinds(next_one)
        assert kept(next_one) == 1
        assert (tmp_path / "memd.lock").read_text() == f"{next_one.process.pid}\n"


def test_c124_serving_goes_on_while_the_database_is_locked_and_gone(
    model, tmp_path, record_property
):
    with serving(tmp_path, str(model), *SETTINGS) as daemon:
        free = completions(daemon, 3.0)
        with closing(sqlite3.connect(tmp_path / "history.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            locked = completions(daemon, 3.0)
            status = daemon.http.get("/admin/v1/status").json()["history"]
            other.execute("COMMIT")
        record_property("table", f"requests in 3 s: {free} before, {locked} while locked")
        assert status["state"] == "failing"
        assert "locked" in status["failure"]
        assert locked > free / 2  # of a machine that runs other tests too; a wait would leave none
        daemon.wait_until(lambda: kept(daemon) == free + locked, 60, "no row is lost")
        assert daemon.metric("memd_history_rows_total", outcome="dropped") == 0

        (tmp_path / "history.db").unlink()
        gone = completions(daemon, 1.0)
        daemon.wait_until(lambda: kept(daemon) == gone, 60, "the new file has all rows since")
        assert os.stat(tmp_path / "history.db").st_mode & 0o777 == 0o600


def test_starts_deaths_and_ends_are_events(model, tmp_path):
    with serving(tmp_path, str(model), *SETTINGS) as daemon:
        old = kill_engine(daemon)
        wait_for_engine(daemon, old)
        daemon.wait_until(lambda: "engine_death" in kinds(daemon), 60, "the death is told")
        query = {"kind": "engine_death"}
        [death] = daemon.http.get("/admin/v1/events", params=query).json()["events"]
        assert death["details"]["reason"] == "killed"
        assert "SIGKILL" in death["message"]
    with closing(sqlite3.connect(tmp_path / "history.db")) as database:
        rows = database.execute("SELECT kind FROM events ORDER BY id").fetchall()
    assert rows[0] == ("daemon_start",)
    assert rows[-1] == ("daemon_stop",)


def test_a_real_engine_tells_what_a_request_has_cost(model, tmp_path):
    with serving(tmp_path, str(model), *SETTINGS, "memory.page_tokens=16") as daemon:
        daemon.complete("x" * 40, max_tokens=30, ignore_eos=True)
        daemon.wait_until(lambda: kept(daemon) == 1, 60, "the request is kept")
        [row] = daemon.http.get("/admin/v1/history/requests").json()["requests"]
        assert row["peak_pages"] in (5, 6)  # 69 or 70 tokens, one of them maybe a step ahead
        assert (row["preemptions"], row["stall_seconds"]) == (0, 0.0)
        assert row["queue_seconds"] >= 0


def test_a_url_that_leads_nowhere_does_not_keep_it_from_serving(model, tmp_path):
    url = "history.url=postgresql://memd@127.0.0.1:1/memd"
    with serving(tmp_path, str(model), *SETTINGS, url) as daemon:
        daemon.complete("hello", max_tokens=4)
        status = daemon.http.get("/admin/v1/status").json()["history"]
        assert status["state"] == "failing"
        assert status["database"] == "postgresql+psycopg://memd@127.0.0.1:1/memd"
        assert daemon.http.get("/admin/v1/events").status_code == 503
