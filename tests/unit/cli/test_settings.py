"""`memd settings`: what is asked of the daemon, and how its answers are shown."""

import getpass
import json

import pytest

from memd.cli.settings import parse_pairs

IN_FORCE = {
    "revision": 3,
    "settings": {"memory": {"watermark": {"high": 0.9, "low": 0.7}}, "state_dir": None},
    "live": {"memory.watermark.high": {}, "memory.watermark.low": {}},
}
CHANGED = {
    "revision": 4,
    "changes": {"memory.watermark.high": {"old": 0.9, "new": 0.6}},
}


def test_get(daemon, memd):
    daemon.answers["GET /admin/v1/settings"] = (200, IN_FORCE)
    table = memd("settings", "get").stdout
    assert [line.split() for line in table.splitlines()] == [
        ["key", "value", "changes"],
        ["memory.watermark.high", "90%", "live"],
        ["memory.watermark.low", "70%", "live"],
        ["state_dir", "none", "at", "start"],
    ]
    assert "low" not in memd("settings", "get", "memory.watermark.high").stdout
    section = json.loads(memd("settings", "get", "memory", "--format", "json").stdout)
    assert section == {
        "revision": 3,
        "settings": {"memory.watermark.high": 0.9, "memory.watermark.low": 0.7},
    }
    refused = memd("settings", "get", "memory.watermark.hig")
    assert refused.exit_code == 2
    assert "memory.watermark.hig" in refused.stderr


def test_set_changes_several_keys_at_once_from_the_current_revision(daemon, memd):
    daemon.answers["GET /admin/v1/settings"] = (200, IN_FORCE)
    daemon.answers["PATCH /admin/v1/settings"] = (200, CHANGED)
    pairs = ["memory.watermark.high", "60%", "memory.watermark.low", "0.4"]
    result = memd("settings", "set", *pairs, "--reason", "try")
    assert result.exit_code == 0
    assert daemon.body_of("PATCH /admin/v1/settings") == {
        "revision": 3,
        "reason": "try",
        "changes": {"memory.watermark.high": "60%", "memory.watermark.low": 0.4},
        "who": getpass.getuser(),
    }
    assert "memory.watermark.high  90%  60%" in result.stdout
    assert "revision 4" in result.stdout


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("0.5", 0.5),
        ("null", None),
        ("true", True),
        ("auto", "auto"),
        ("16MiB", "16MiB"),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        ("1e999", "1e999"),
        (".nan", ".nan"),
        ("2026-01-01", "2026-01-01"),
        ("", ""),
    ],
)
def test_values_reach_the_daemon_as_they_were_meant(text, value):
    assert parse_pairs(["key", text]) == {"key": value}


def test_set_on_a_given_revision(daemon, memd):
    stale = {"error": {"message": "revision 2 is stale: it is 3", "code": "stale_revision"}}
    daemon.answers["PATCH /admin/v1/settings"] = (409, stale)
    result = memd("settings", "set", "log_level", "debug", "--reason", "x", "--revision", "2")
    assert result.exit_code == 4
    assert result.stderr == "memd: revision 2 is stale: it is 3\n"
    assert [route for route, _ in daemon.asked] == ["PATCH /admin/v1/settings"]


def test_a_change_that_changes_nothing(daemon, memd):
    daemon.answers["PATCH /admin/v1/settings"] = (200, {"revision": 3, "changes": {}})
    result = memd("settings", "set", "log_level", "info", "--reason", "x", "--revision", "3")
    assert result.stdout == "nothing differs from what is in force\nrevision 3\n"


def test_preview(daemon, memd):
    effect = {"occupied_ratio": 0.8, "occupied_ratio_after": 0.4, "reclaimed_pages": 25}
    good = {"valid": True, "problems": {}, "changes": CHANGED["changes"], "effect": effect}
    daemon.answers["POST /admin/v1/settings/preview"] = (200, good)
    result = memd("settings", "preview", "memory.watermark.high", "60%")
    assert result.exit_code == 0
    assert "memory.watermark.high  90%  60%" in result.stdout
    assert "reclaimed_pages       25" in result.stdout
    body = daemon.body_of("POST /admin/v1/settings/preview")
    assert body == {"changes": {"memory.watermark.high": "60%"}}


def test_preview_of_what_would_be_refused(daemon, memd):
    bad = {"valid": False, "problems": {"log_level": "not live"}, "changes": {}, "effect": None}
    daemon.answers["POST /admin/v1/settings/preview"] = (200, bad)
    result = memd("settings", "preview", "log_level", "debug")
    assert result.exit_code == 4
    assert "log_level  not live" in result.stdout


def test_undo(daemon, memd):
    daemon.answers["POST /admin/v1/settings/undo"] = (200, CHANGED)
    assert "revision 4" in memd("settings", "undo", "--reason", "no good").stdout
    assert daemon.body_of("POST /admin/v1/settings/undo")["reason"] == "no good"


def test_history(daemon, memd):
    start = {"revision": 1, "time": 0.0, "who": "local", "reason": "start", "kind": "start"}
    change = start | CHANGED | {"time": 9e8, "who": "kim", "reason": "more room", "kind": "change"}
    history = {"history": [start | {"changes": {}}, change]}
    daemon.answers["GET /admin/v1/settings/history"] = (200, history)
    lines = memd("settings", "history").stdout.splitlines()
    assert lines[0].split() == ["revision", "time", "who", "kind", "changes", "reason"]
    assert lines[2].split()[-8:] == [
        "kim",
        "change",
        *["memory.watermark.high", "90%", "→", "60%"],
        "more",
        "room",
    ]
    assert json.loads(memd("settings", "history", "--format", "json").stdout) == history
