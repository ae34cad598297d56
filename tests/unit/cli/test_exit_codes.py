"""How commands end: documented codes, one line on stderr."""

import json
import subprocess
import sys
import time

import pytest

from memd.cli.common import EXIT_CODES

ERRORS = {
    "stale": (409, {"error": {"message": "revision 3 is stale: 5", "code": "stale_revision"}}, 4),
    "invalid": (400, {"error": {"message": "low (0.9) must be below high", "code": None}}, 4),
    "unknown": (404, {"error": {"message": "no such request", "code": "not_found"}}, 4),
    "loading": (503, {"error": {"message": "memd is loading", "code": "loading"}}, 4),
    "bug": (500, {"error": {"message": "internal error abc", "code": None}}, 1),
    "another program": (200, "<html>", 1),
    "another shape": (404, {"detail": "Not Found"}, 1),
}


@pytest.mark.parametrize(("status", "body", "code"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_of_the_daemon(daemon, memd, status, body, code):
    daemon.answers["GET /admin/v1/pool"] = (status, body)
    result = memd("pool", "show")
    assert result.exit_code == code
    expected = body["error"]["message"] if "error" in body else "not as memd does"
    assert result.stderr.startswith("memd: ")
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_nobody_listens(memd, dead_url):
    result = memd("status", "--check", "--url", dead_url)
    assert result.exit_code == 3
    assert dead_url in result.stderr


def test_a_malformed_address(memd):
    assert memd("status", "--url", "nonsense").exit_code == 3


@pytest.mark.parametrize(("state", "code"), [("ready", 0), ("loading", 5), ("draining", 5)])
def test_status_check(daemon, memd, state, code):
    daemon.answers["GET /admin/v1/status"] = (200, {"state": state, "engine": {"pid": None}})
    assert memd("status", "--check").exit_code == code
    result = memd("status")
    assert result.exit_code == 0
    assert "engine.pid  -" in result.stdout
    assert json.loads(memd("status", "--format", "json").stdout)["state"] == state


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["status", "--nonsense"],
        ["settings", "set", "memory.watermark.high", "--reason", "odd"],
        ["settings", "set", "memory.watermark.high", "60%"],
        ["pool", "reclaim", "--pages", "0"],
        ["serve", "--set", "memory.watermark.high=50"],
        ["serve", "--set", "memory.watermark.nonsense=50%"],
        ["serve", "--port", "99999"],
        ["serve", "--config", "/nonexistent.yaml"],
    ],
    ids=" ".join,
)
def test_usage(memd, arguments):
    result = memd(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_help_names_every_exit_code(memd):
    text = " ".join(memd("--help").stdout.split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code:d} {meaning}" in text


def test_help_loads_nothing_heavy():
    heavy = ("torch", "pydantic", "httpx2", "gguf", "numpy", "yaml", "zmq", "fastapi")
    program = (
        "import sys\nfrom memd.cli import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        f"print([m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    )
    started = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stderr.strip() == "[]"
    assert time.monotonic() - started < 5
