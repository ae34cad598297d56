"""One scheduler for each state directory."""

import os
import signal
import subprocess
import sys

import pytest
from served import serving
from tiny import write_model


@pytest.mark.slow
def test_c128_a_second_daemon_runs_no_jobs_and_a_killed_one_leaves_none_behind(tmp_path):
    model = write_model(tmp_path / "tiny")
    fast = ("history.sample_every=1s", "alerts.evaluate_every=1s")
    with serving(tmp_path, str(model), *fast, exit_code=-signal.SIGKILL) as daemon:
        command = [sys.executable, "-m", "memd.cli", "serve", "--model", str(model), "--port", "0"]
        command += ["--state-dir", str(tmp_path)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert second.returncode != 0
        assert str(daemon.process.pid) in second.stderr

        def counts():
            jobs = daemon.http.get("/admin/v1/jobs").json()["jobs"]
            return {job["name"]: job["runs"] for job in jobs}

        before = counts()["sampling"]["ok"]
        daemon.wait_until(lambda: counts()["sampling"]["ok"] > before + 1, 60, "it goes on")
        assert daemon.complete("hello", max_tokens=2)
        assert all(runs["error"] == 0 for runs in counts().values())
        os.kill(daemon.process.pid, signal.SIGKILL)
        daemon.process.wait(60)
    with serving(tmp_path, str(model), *fast) as daemon:
        daemon.wait_until(
            lambda: daemon.metric("memd_job_runs_total", job_name="sampling", outcome="ok") > 1,
            60,
            "jobs run again",
        )
