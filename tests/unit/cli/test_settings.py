"""`memd settings`: what is asked of the daemon, and how its answers are shown."""

import getpass
import json

import pytest
import typer

from memd.cli.settings import parse_pairs

DEFAULT = {"source": "default", "since": 9e8}
KIM = {"source": "live", "since": 9e8, "who": "kim", "reason": "room", "revision": 3}
HIGH_LIVE = {
    **{"value": 0.9, "default": 0.9, "description": "Reclaim starts", "type": "number"},
    **{"unit": "share of one", "minimum": 0, "maximum": 1, "choices": [], "nullable": False},
    **KIM,
    **{"persisted": False, "beneath": {"source": "file", "value": 0.88}},
}
IN_FORCE = {
    "revision": 3,
    "settings": {"memory": {"watermark": {"high": 0.9, "low": 0.7}}, "state_dir": None},
    "live": {
        "memory.watermark.high": HIGH_LIVE,
        "memory.watermark.low": {**HIGH_LIVE, **DEFAULT, "beneath": None},
    },
    "sources": {
        "memory.watermark.high": {**KIM, "persisted": False},
        "memory.watermark.low": DEFAULT,
        "state_dir": DEFAULT,
    },
    "pending": None,
    "file": None,
    "last_reload": {"at": 9e8, "ok": True, "error": None},
}
CHANGED = {
    "revision": 4,
    "changes": {"memory.watermark.high": {"old": 0.9, "new": 0.6}},
    "pending": None,
}
WAITS = {"revision": 4, "seconds_left": 599.6, "confirm_by": 9e8, "changes": CHANGED["changes"]}


def test_get(daemon, memd):
    daemon.answers["GET /admin/v1/settings"] = (200, IN_FORCE)
    table = memd("settings", "get").stdout
    assert [line.split() for line in table.splitlines()] == [
        ["key", "value", "source", "changes"],
        ["memory.watermark.high", "90%", "live", "live"],
        ["memory.watermark.low", "70%", "default", "live"],
        ["state_dir", "none", "default", "at", "start"],
    ]
    assert "low" not in memd("settings", "get", "memory.watermark").stdout.splitlines()[1]
    section = json.loads(memd("settings", "get", "memory", "--format", "json").stdout)
    assert section["settings"] == {"memory.watermark.high": 0.9, "memory.watermark.low": 0.7}
    assert section["sources"].keys() == section["settings"].keys()
    assert (section["revision"], section["pending"]) == (3, None)
    refused = memd("settings", "get", "memory.watermark.hig")
    assert refused.exit_code == 2
    assert "memory.watermark.hig" in refused.stderr


def test_get_tells_all_about_one_key(daemon, memd):
    daemon.answers["GET /admin/v1/settings"] = (200, IN_FORCE)
    lines = memd("settings", "get", "memory.watermark.high").stdout.splitlines()
    told = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert (told["value"], told["default"], told["source"]) == ("90%", "90%", "live")
    assert (told["who"], told["reason"], told["revision"]) == ("kim", "room", "3")
    assert (told["beneath"], told["persisted"]) == ("88%, file", "no")
    assert told["allowed"] == "from 0% to 100% (share of one)"
    assert "beneath" not in memd("settings", "get", "memory.watermark.low").stdout
    assert "start of the daemon" in memd("settings", "get", "state_dir").stdout


def test_what_reverts_by_itself_is_told(daemon, memd):
    daemon.answers["GET /admin/v1/settings"] = (200, {**IN_FORCE, "pending": WAITS})
    result = memd("settings", "get", "--format", "json")
    assert json.loads(result.stdout)["pending"] == WAITS
    assert result.stderr == (
        "revision 4 reverts by itself in 600 s; to keep it: memd settings confirm 4\n"
    )
    daemon.answers["POST /admin/v1/settings/confirm"] = (200, {"revision": 4, "changes": {}})
    assert memd("settings", "confirm").stdout == "revision 4 stays\n"
    body = daemon.body_of("POST /admin/v1/settings/confirm")
    assert body == {"revision": 4, "source": "cli", "who": getpass.getuser()}
    daemon.answers["GET /admin/v1/settings"] = (200, IN_FORCE)
    nothing = memd("settings", "confirm")
    assert (nothing.exit_code, nothing.stderr) == (4, "memd: no change waits to be confirmed\n")


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
        "source": "cli",
        "who": getpass.getuser(),
    }
    assert "memory.watermark.high  90%  60%" in result.stdout
    assert "revision 4" in result.stdout


def test_keys_and_values_in_either_form():
    words = ["memory.limit=4GB", "memory.watermark.high", "80%", "history.url=sqlite:///a?b=c"]
    assert parse_pairs([*words, "trace.record", "a=b"]) == {
        "memory.limit": "4GB",
        "memory.watermark.high": "80%",
        "history.url": "sqlite:///a?b=c",
        "trace.record": "a=b",
    }
    for wrong in (["a.b", "1", "a.b=2"], ["a.b"], ["a.b=1", "c"]):
        with pytest.raises(typer.BadParameter):
            parse_pairs(wrong)


def test_set_with_a_safety_net(daemon, memd):
    daemon.answers["PATCH /admin/v1/settings"] = (200, {**CHANGED, "pending": WAITS})
    pair = ("memory.watermark.high", "60%", "--reason", "try", "--revision", "3")
    result = memd("settings", "set", *pair, "--persist", "--revert-after", "10m")
    body = daemon.body_of("PATCH /admin/v1/settings")
    assert (body["persist"], body["revert_after_seconds"]) == (True, 600.0)
    assert "memd settings confirm 4" in result.stderr
    wrong = memd("settings", "set", *pair, "--revert-after", "10")
    assert wrong.exit_code == 2
    assert "needs a unit" in wrong.stderr


def test_reset(daemon, memd):
    daemon.answers["GET /admin/v1/settings"] = (200, IN_FORCE)
    daemon.answers["PATCH /admin/v1/settings"] = (200, CHANGED)
    assert memd("settings", "reset", "memory.watermark.high", "--reason", "no").exit_code == 0
    body = daemon.body_of("PATCH /admin/v1/settings")
    assert (body["reset"], body["changes"]) == (["memory.watermark.high"], {})


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
    same = {"revision": 3, "changes": {}, "pending": None}
    daemon.answers["PATCH /admin/v1/settings"] = (200, same)
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
    me = {"source": "cli", "who": getpass.getuser()}
    assert daemon.body_of("POST /admin/v1/settings/undo") == {"reason": "no good", **me}
    memd("settings", "undo", "--reason", "no good", "--revision", "2")
    assert daemon.body_of("POST /admin/v1/settings/undo")["revision"] == 2


def test_reload(daemon, memd):
    results = {
        "memory.watermark.high": {"result": "overridden", "old": 0.8, "new": 0.9},
        "memory.watermark.low": {"result": "applied", "old": 0.7, "new": 0.6},
        "server.port": {"result": "needs_restart", "old": 8733, "new": 1},
        "log_level": {"result": "unchanged", "old": "info", "new": "info"},
    }
    daemon.answers["POST /admin/v1/settings/reload"] = (200, {"revision": 5, "results": results})
    lines = memd("settings", "reload").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["key", "result", "in", "force", "sources", "say"],
        ["memory.watermark.high", "overridden", "80%", "90%"],
        ["memory.watermark.low", "applied", "60%", "60%"],
        ["server.port", "needs", "restart", "8733", "1"],
        ["revision", "5"],
    ]
    same = {"log_level": results["log_level"]}
    daemon.answers["POST /admin/v1/settings/reload"] = (200, {"revision": 5, "results": same})
    assert (
        memd("settings", "reload").stdout == "nothing differs from what is in force\nrevision 5\n"
    )


def test_diff(daemon, memd):
    row = {"in_force": 0.8, "sources": 0.9, "source": "file", "after_restart": 0.85}
    answer = {"revision": 5, "file": None, "differences": {"memory.watermark.high": row}}
    daemon.answers["GET /admin/v1/settings/diff"] = (200, answer)
    lines = memd("settings", "diff").stdout.splitlines()
    assert lines[1].split() == ["memory.watermark.high", "80%", "90%", "file", "85%"]
    daemon.answers["GET /admin/v1/settings/diff"] = (200, {**answer, "differences": {}})
    assert "nothing differs" in memd("settings", "diff").stdout


def test_export(daemon, memd):
    route = "GET /admin/v1/settings/export?format=toml&everything=true"
    daemon.answers[route] = (200, {"revision": 5, "format": "toml", "text": "# all\na = 1\n"})
    assert memd("settings", "export", "--format", "toml", "--all").stdout == "# all\na = 1\n"


def test_history_tells_what_was_before_and_after(daemon, memd):
    change = {
        **{"revision": 2, "time": 0.0, "who": "kim", "reason": "more room", "kind": "change"},
        **{"source": "cli", "undoes": None, "state": "in force", "taken_back_by": None, **CHANGED},
    }
    before = {"time_to_first_token_p95_seconds": 1.23456, "occupied_ratio": 0.9}
    before |= {"inter_token_latency_p95_seconds": None, "direct_reclaim_ratio": None}
    after = {**before, "time_to_first_token_p95_seconds": 0.8, "occupied_ratio": None}
    rows = [
        change | {"measured": {"window_seconds": 300, "before": before, "after": after}},
        change | {"measured": {"window_seconds": 300, "before": before, "after": None}},
        change | {"measured": None},
    ]
    route = "GET /admin/v1/settings/history?limit=100&measured=true"
    daemon.answers[route] = (200, {"history": rows, "more": False})
    lines = memd("settings", "history").stdout.splitlines()
    assert lines[0].split("reason")[1].split() == ["first", "token", "p95", "occupied"]
    assert lines[1].split("more room")[1].split() == [
        "1.23",
        "s",
        "→",
        "0.8",
        "s",
        "90%",
        "→",
        "-",
    ]
    assert "1.23 s → -" in lines[2]
    assert lines[3].endswith("more room")


def test_history(daemon, memd):
    start = {
        **{"revision": 1, "time": 0.0, "who": "local", "reason": "start", "kind": "start"},
        **{"source": "file", "changes": {}, "undoes": None, "state": None, "taken_back_by": None},
    }
    change = start | {**CHANGED, "who": "kim", "reason": "more room", "kind": "change"}
    change |= {"source": "cli", "state": "taken back", "taken_back_by": 5}
    undo = start | {"revision": 5, "kind": "undo", "undoes": 4, "source": None}
    history = {"history": [start, change, undo], "more": False}
    daemon.answers["GET /admin/v1/settings/history?limit=100&measured=true"] = (200, history)
    lines = [line.split() for line in memd("settings", "history").stdout.splitlines()]
    assert lines[0] == ["revision", "time", "who", "source", "kind", "changes", "state", "reason"]
    assert " ".join(lines[2][3:]) == (
        "kim cli change memory.watermark.high 90% → 60% taken back by 5 more room"
    )
    assert " ".join(lines[3][4:8]) == "- undo of 4"
    assert json.loads(memd("settings", "history", "--format", "json").stdout) == history
    memd("settings", "history", "--key", "memory", "--who", "kim", "--since", "2h", "--limit", "5")
    asked = daemon.asked[-1][0]
    assert "key=memory&who=kim&limit=5&since=" in asked
