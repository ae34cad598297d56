"""The keys file: what it holds, who gets in, and what happens when it changes or is damaged."""

import json
import os
import stat

import pytest

from memd.keys import ApiKey, KeysError, KeysFile, find_key, make_key


def a_key(name: str = "one", **changes: object) -> tuple[str, ApiKey]:
    values: dict = {"scopes": ["inference"], "tenant": name, "priority": None, "lifetime": None}
    values |= changes
    return make_key(
        name, values["scopes"], values["tenant"], values["priority"], values["lifetime"]
    )


@pytest.fixture
def keys(tmp_path) -> KeysFile:
    return KeysFile(tmp_path / "deep" / "keys.jsonl")


def test_a_key_is_added_found_and_revoked(keys):
    (first, one), (second, two) = a_key("one"), a_key("two", priority=(0, 9), lifetime=60)
    keys.add(one)
    keys.add(two)
    assert keys.read() == keys.current() == (one, two)
    assert find_key(keys.current(), first) == one
    assert find_key(keys.current(), second) == two
    assert find_key(keys.current(), first + "x") is None
    assert find_key(keys.current(), "") is None
    assert keys.revoke("one") == one
    assert find_key(keys.current(), first) is None
    assert find_key(keys.current(), second) == two


def test_the_file_is_private_and_holds_no_key(keys):
    text, key = a_key()
    keys.add(key)
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    assert text not in keys.path.read_text()
    assert text.removeprefix("memd-") not in keys.path.read_text()
    keys.add(a_key("two")[1])
    keys.revoke("one")
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    assert [path.name for path in keys.path.parent.iterdir()] == ["keys.jsonl"]


def test_equal_keys_would_not_show():
    assert len({a_key()[0] for _ in range(50)}) == 50
    assert len({a_key()[1].salt for _ in range(50)}) == 50


def test_expiry():
    _, key = a_key(lifetime=60)
    assert key.expires == pytest.approx(key.created + 60)
    assert not key.expired(key.created + 59)
    assert key.expired(key.created + 60)
    assert not a_key()[1].expired(1e12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scopes": ["inference", "root"]}, "'root' is no scope"),
        ({"scopes": []}, "scopes"),
        ({"tenant": "a\0b"}, "tenant"),
        ({"tenant": "x" * 65}, "tenant"),
        ({"priority": (5, 1)}, "priority"),
        ({"priority": (0, 2**31)}, "2147483647"),
        ({"name": "two words"}, "name is 'two words'"),
    ],
)
def test_what_no_key_may_have(changes, words):
    with pytest.raises(KeysError, match=words):
        a_key(**changes)


def test_names_are_unique(keys):
    keys.add(a_key()[1])
    with pytest.raises(KeysError, match="'one' already"):
        keys.add(a_key()[1])
    with pytest.raises(KeysError, match="no key of the name 'two'"):
        keys.revoke("two")


def fields(**changes: object) -> str:
    _, key = a_key("bad")
    return json.dumps({**key.__dict__, **changes})


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        "{}",
        "null",
        fields(extra=1),
        fields(salt="zz"),
        fields(digest=None),
        fields(scopes="inference"),
        fields(scopes=[{}]),
        fields(priority=[1]),
        fields(priority=[True, 2]),
        fields(expires="tomorrow"),
        fields(created=None),
        fields(name="one"),
    ],
)
def test_a_damaged_line_opens_nothing_and_closes_nothing_else(keys, caplog, line):
    text, key = a_key()
    keys.add(key)
    with keys.path.open("a") as file:
        file.write(f"\n{line}\n")
    assert keys.current() == (key,)
    assert find_key(keys.current(), text) == key
    assert "line 3" in caplog.text
    assert key.digest not in caplog.text
    with pytest.raises(KeysError, match="line 3"):
        keys.read()


def test_a_file_that_is_gone_opens_nothing(keys, caplog):
    text, key = a_key()
    assert keys.current() == ()
    keys.add(key)
    assert find_key(keys.current(), text)
    keys.path.unlink()
    assert keys.current() == ()
    assert "no key is valid any more" in caplog.text
    keys.add(key)
    assert find_key(keys.current(), text)


def test_an_unchanged_file_is_not_read_again(keys, monkeypatch):
    keys.add(a_key()[1])
    first = keys.current()
    assert keys.current() is first
    os.utime(keys.path, ns=(1, 1))
    assert keys.current() is not first
