"""`memd doctor` on this machine."""

import json
import socket

import pytest

NAMES = ["python", "torch", "triton", "gpu", "memory", "disk", "model", "port", "daemon"]


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def results(result):
    return {check["name"]: check for check in json.loads(result.stdout)}


def test_every_check_says_what_it_found_and_what_to_do(memd, dead_url):
    result = memd("doctor", "--url", dead_url, "--format", "json")
    checks = results(result)
    assert list(checks) == NAMES
    assert all(check["finding"] for check in checks.values())
    assert checks["model"]["result"] == "warn"
    assert "memd models fetch smollm2-135m" in checks["model"]["finding"]
    assert checks["daemon"]["result"] == "warn"
    assert result.exit_code == 0
    assert memd("doctor", "--url", dead_url).stdout.count("\n") == len(NAMES) + 1


def test_a_ready_daemon_on_a_taken_port(daemon, memd, monkeypatch):
    daemon.answers["GET /admin/v1/status"] = (200, {"state": "ready"})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MEMD_SERVER_PORT", str(taken.getsockname()[1]))
        checks = results(memd("doctor", "--format", "json"))
    assert checks["daemon"]["result"] == "ok"
    assert checks["port"]["result"] == "warn"


def test_another_program_at_the_address_fails(daemon, memd):
    daemon.answers["GET /admin/v1/status"] = (200, "<html>")
    assert memd("doctor").exit_code == 1


def test_settings_of_the_environment_are_checked(memd, monkeypatch):
    monkeypatch.setenv("MEMD_MEMORY_WATERMARK_HIGH", "95")
    result = memd("doctor")
    assert result.exit_code == 2
    assert "memory.watermark.high" in result.stderr
