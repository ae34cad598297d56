"""Settings over the lives of a real daemon: reload by signal, kept values, history, revert."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from served import Daemon, serving
from tiny import write_model

pytestmark = pytest.mark.slow

HIGH, LOW = "memory.watermark.high", "memory.watermark.low"
ROOT = "/admin/v1/settings"
LIMITS = ("memory.limit=2048 tokens", "engine.device=cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model") / "tiny", max_position=256))


def change(daemon: Daemon, changes: dict[str, Any], **more: Any) -> None:
    revision = daemon.http.get(ROOT).json()["revision"]
    body = {"revision": revision, "reason": "test", "changes": changes, **more}
    response = daemon.http.patch(ROOT, json=body)
    assert response.status_code == 200, response.text


def marks(daemon: Daemon) -> tuple[float, float]:
    """High and low as the engine has them."""
    ratio = (daemon.metric("memd_pool_watermark_ratio", level=level) for level in ("high", "low"))
    high, low = ratio
    return high, low


def history(daemon: Daemon) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = daemon.http.get(f"{ROOT}/history").json()["history"]
    return rows


def kinds(daemon: Daemon) -> set[str]:
    """Of the events in the database."""
    return {row["kind"] for row in daemon.http.get("/admin/v1/events").json()["events"]}


def test_a_signal_reloads_the_file(tmp_path: Path, model: str) -> None:
    file = tmp_path / "memd.yaml"
    file.write_text("memory.watermark: {high: 80%, low: 40%}\n")
    with serving(tmp_path, model, *LIMITS, config=file) as daemon:
        assert daemon.http.get(ROOT).json()["sources"][HIGH]["source"] == "file"
        file.write_text("memory.watermark: {high: 85%, low: 30%}\nserver.max_choices: 3\n")
        os.kill(daemon.process.pid, signal.SIGHUP)
        daemon.wait_until(lambda: marks(daemon) == (0.85, 0.3), 60, "the engine has the new marks")
        assert daemon.metric("memd_config_last_reload_successful") == 1
        row = history(daemon)[-1]
        assert (row["kind"], row["source"], row["reason"]) == ("reload", "file", "SIGHUP")
        assert "max_choices" not in str(row["changes"])

        file.write_text("memory.watermark: {high: 20%, low: 30%}\n")
        os.kill(daemon.process.pid, signal.SIGHUP)
        daemon.wait_until(
            lambda: daemon.metric("memd_config_last_reload_successful") == 0, 60, "it is refused"
        )
        assert marks(daemon) == (0.85, 0.3)
        assert "settings are not reloaded" in (tmp_path / "log").read_text()
        daemon.wait_until(lambda: "settings_reload_failed" in kinds(daemon), 60, "an event")


def test_kept_values_and_history_outlast_the_daemon(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model, *LIMITS) as daemon:
        change(daemon, {HIGH: 0.8}, persist=True, who="kim")
        change(daemon, {LOW: 0.5})
        assert marks(daemon) == (0.8, 0.5)
    with serving(tmp_path, model, *LIMITS) as daemon:
        assert marks(daemon) == (0.8, 0.7)
        assert daemon.metric("memd_settings_revision") == 4
        source = daemon.http.get(ROOT).json()["sources"][HIGH]
        assert (source["source"], source["who"], source["revision"]) == ("live", "kim", 2)
        rows = history(daemon)
        assert [(row["revision"], row["kind"]) for row in rows] == [
            *((1, "start"), (2, "change"), (3, "change"), (4, "start")),
        ]
        assert [row["state"] for row in rows] == [None, "in force", "ended", None]
        undone = daemon.post(f"{ROOT}/undo", {"reason": "back"}).json()
        assert (undone["revision"], undone["changes"]) == (5, {HIGH: {"old": 0.8, "new": 0.9}})
    with serving(tmp_path, model, *LIMITS) as daemon:
        assert marks(daemon) == (0.9, 0.7)
        assert [row["revision"] for row in history(daemon)] == [1, 2, 3, 4, 5, 6]


def test_the_history_does_not_need_the_database(tmp_path: Path, model: str) -> None:
    """A database that is a directory: nothing is recalled, numbers rise and values are kept."""
    (tmp_path / "history.db").mkdir()
    with serving(tmp_path, model, *LIMITS) as daemon:
        change(daemon, {HIGH: 0.8}, persist=True)
    with serving(tmp_path, model, *LIMITS) as daemon:
        assert marks(daemon) == (0.8, 0.7)
        change(daemon, {HIGH: 0.85})
        assert [row["revision"] for row in history(daemon)] == [3, 4]


def test_a_revert_survives_the_death_of_the_engine(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, model, *LIMITS) as daemon:
        change(daemon, {HIGH: 0.8}, revert_after_seconds=1.5)
        pid = daemon.http.get("/admin/v1/status").json()["engine"]["pid"]
        os.kill(pid, signal.SIGKILL)
        daemon.wait_until(lambda: history(daemon)[-1]["kind"] == "revert", 60, "it reverts")
        daemon.wait_until(lambda: marks(daemon) == (0.9, 0.7), 60, "in the new engine too")
        assert daemon.http.get(ROOT).json()["pending"] is None
        assert daemon.http.get("/admin/v1/status").json()["engine"]["restarts"] == 1
