"""`memd status --wait`: for scripts that start a daemon."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result

from memd import __version__
from memd.cli.common import show

LOADING = {"status": "loading", "stage": "weights", "progress": 0.5}


def test_it_waits_until_the_daemon_is_ready(memd: Callable[..., Result], daemon: Any) -> None:
    daemon.answers["GET /health/ready"] = (503, LOADING)
    daemon.answers["GET /admin/v1/status"] = (200, {"state": "ready"})

    def become_ready() -> None:
        time.sleep(0.6)
        daemon.answers["GET /health/ready"] = (200, {"status": "ok"})

    thread = threading.Thread(target=become_ready)
    thread.start()
    started_at = time.monotonic()
    assert memd("status", "--check", "--wait", "20s").exit_code == 0
    assert 0.5 < time.monotonic() - started_at < 10
    thread.join()


def test_it_waits_no_longer_than_it_is_told(memd: Callable[..., Result], daemon: Any) -> None:
    daemon.answers["GET /health/ready"] = (503, LOADING)
    daemon.answers["GET /admin/v1/status"] = (200, {"state": "loading"})
    assert memd("status", "--check", "--wait", "300ms").exit_code == 5


def test_a_daemon_that_failed_is_not_waited_for(memd: Callable[..., Result], daemon: Any) -> None:
    daemon.answers["GET /health/ready"] = (503, {"status": "failed"})
    daemon.answers["GET /admin/v1/status"] = (200, {"state": "failed"})
    started_at = time.monotonic()
    assert memd("status", "--check", "--wait", "1m").exit_code == 5
    assert time.monotonic() - started_at < 10


def test_nobody_comes(memd: Callable[..., Result], dead_url: str) -> None:
    assert memd("status", "--wait", "300ms", "--url", dead_url).exit_code == 3


@pytest.mark.parametrize("duration", ["soon", "10", "-1s"])
def test_no_duration(memd: Callable[..., Result], duration: str) -> None:
    result = memd("status", "--wait", duration)
    assert result.exit_code == 2
    assert duration in result.stderr


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("transferred_bytes.d2h", 4096, "4.0 KiB"),
        ("dropped_pages.attention_share", 3, "3"),
        ("fragmentation_ratio", 0.05, "5%"),
        ("watermark.high", 0.9, "90%"),
        ("history.failure", None, "-"),
        ("under_pressure", False, "no"),
    ],
)
def test_the_unit_of_a_number_is_told_by_its_names(name: str, value: Any, text: str) -> None:
    assert show(value, name) == text


def test_moments_are_dates() -> None:
    assert show(1_800_000_000.0, "last_run_at").startswith("2027-01-1")


def test_the_version(memd: Callable[..., Result]) -> None:
    result = memd("--version")
    assert (result.exit_code, result.stdout) == (0, f"memd {__version__}\n")
