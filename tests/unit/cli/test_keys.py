"""`memd keys`: one key printed once, and a file that a daemon can use."""

import json

import pytest

from memd.keys import KeysFile, find_key


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "keys.jsonl"
    monkeypatch.setenv("MEMD_SERVER_KEYS_FILE", str(path))
    return path


def test_add_list_revoke(memd, file):
    added = memd("keys", "add", "ann", "--scopes", "inference, metrics", "--priority", "-5:10")
    assert added.exit_code == 0, added.output
    key = find_key(KeysFile(file).read(), added.stdout.strip())
    assert key is not None
    assert (key.scopes, key.tenant, key.priority) == (("inference", "metrics"), "ann", (-5, 10))
    assert memd("keys", "add", "bob", "--tenant", "team", "--expires", "0s").exit_code == 0

    table = memd("keys", "list").stdout
    assert "-5:10" in table
    assert "never" in table
    rows = json.loads(memd("keys", "list", "--format", "json").stdout)["keys"]
    assert [(row["name"], row["tenant"], row["state"]) for row in rows] == [
        ("ann", "ann", "valid"),
        ("bob", "team", "expired"),
    ]
    assert key.digest not in table + str(rows)
    assert key.salt not in table + str(rows)

    assert memd("keys", "revoke", "ann").exit_code == 0
    assert [each.name for each in KeysFile(file).read()] == ["bob"]


def test_the_usual_file_is_in_the_state_directory(memd, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMD_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("MEMD_SERVER_KEYS_FILE", raising=False)
    assert memd("keys", "add", "ann").exit_code == 0
    assert (tmp_path / "keys.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("add", "ann", "--scopes", "root"), 1, "'root' is no scope"),
        (("add", "two words"), 1, "name is 'two words'"),
        (("add", "ann", "--priority", "high"), 2, "--priority"),
        (("add", "ann", "--expires", "soon"), 2, "--expires"),
        (("revoke", "ann"), 1, "cannot be read"),
        (("list",), 1, "cannot be read"),
    ],
)
def test_what_is_refused(memd, file, arguments, code, words):
    result = memd("keys", *arguments)
    assert result.exit_code == code
    assert words in result.output
    assert not file.exists()


def test_the_key_goes_with_every_call(memd, daemon, monkeypatch):
    daemon.answers["GET /admin/v1/status"] = (200, {"state": "ready"})
    monkeypatch.setenv("MEMD_API_KEY", "memd-secret")
    assert memd("status").exit_code == 0
    assert daemon.headers["authorization"] == "Bearer memd-secret"
    monkeypatch.delenv("MEMD_API_KEY")
    assert memd("status").exit_code == 0
    assert "authorization" not in daemon.headers
