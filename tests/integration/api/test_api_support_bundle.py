"""The support bundle: everything is in it but secrets and text, and it is made when things fail."""

import io
import json
import logging
import tarfile
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from memd.cli import app
from memd.config import build
from memd.errors import MemdError
from memd.log_tail import LogTail
from memd.scrub import REMOVED, Scrubber, known_secrets

PATH = "/admin/v1/support-bundle"
PROMPT = "the recipe of the secret sauce"
PASSWORD = "hunter2-and-more"
CHANNEL_TOKEN = "T0KEN1234567890abcdef"
HUB_TOKEN = "some-value-of-the-environment"
KEY = "memd-" + "k3y" * 14


def files_of(data: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = archive.getmembers()
        assert all(each.mode == 0o600 and each.isfile() for each in members)
        texts = {each.name: archive.extractfile(each).read().decode() for each in members}
    assert len({name.partition("/")[0] for name in texts}) == 1
    return {name.partition("/")[2]: text for name, text in texts.items()}


@pytest.fixture
def stand(make_stand, tmp_path, monkeypatch):
    """One whose settings name files that hold secrets."""
    monkeypatch.setenv("HF_TOKEN", HUB_TOKEN)
    channels = tmp_path / "channels.yaml"
    channels.write_text(yaml.safe_dump({"team": f"slack://{CHANNEL_TOKEN}/{CHANNEL_TOKEN[::-1]}"}))
    return make_stand(settings={"alerts.channels": channels})


def test_it_holds_what_helps_and_nothing_that_is_secret(stand):
    log = logging.getLogger("memd.test")
    root = logging.getLogger()
    root.addHandler(stand.service.log_tail)
    try:
        stand.complete(prompt=PROMPT, max_tokens=2)
        log.warning("cannot notify slack://%s/x", CHANNEL_TOKEN)
        log.warning("Authorization: Bearer %s", KEY)
        log.warning("postgresql://memd:%s@db/memd is gone", PASSWORD)
        log.warning("HF says %s", HUB_TOKEN)
        headers = {"x-request-id": "my-name-is-bond"}
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}
        stand.http.post("/v1/completions", json=body, headers=headers)
        rows = "/admin/v1/history/requests"
        assert stand.wait_for(lambda: len(stand.http.get(rows).json()["requests"]) == 2)
        response = stand.http.get(PATH)
    finally:
        root.removeHandler(stand.service.log_tail)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/gzip"
    assert '.tar.gz"' in response.headers["content-disposition"]
    files = files_of(response.content)
    manifest = json.loads(files["manifest.json"])
    assert set(manifest["files"]) == files.keys() - {"manifest.json"}
    wanted = {"status.json", "settings.json", "snapshot.json", "metrics.txt", "events.json"}
    wanted |= {"stacks-api.txt", "stacks-tasks.txt", "versions.json", "doctor.json", "log.txt"}
    assert wanted <= files.keys()
    assert "alerts.json" in manifest["problems"], "alerts are off in this stand"
    settings = json.loads(files["settings.json"])
    assert settings["sources"]["memory.watermark.high"]["source"] == "default"
    assert json.loads(files["finished-requests.json"])["requests"][0]["prompt_tokens"]
    assert "memd_pool_pages" in files["metrics.txt"]
    assert {check["name"] for check in json.loads(files["doctor.json"])} >= {"python", "disk"}
    assert "is gone" in files["log.txt"]
    assert "EngineClient.run" in files["stacks-tasks.txt"]
    whole = "\n".join(files.values())
    for secret in (PROMPT, CHANNEL_TOKEN, KEY, PASSWORD, HUB_TOKEN, "my-name-is-bond"):
        assert secret not in whole, secret
    events = "/admin/v1/events?kind=support_bundle"
    assert stand.wait_for(lambda: stand.http.get(events).json()["events"])


def test_it_is_made_while_the_engine_hangs_and_the_database_is_gone(stand, monkeypatch):
    monkeypatch.setattr("memd.api.support_bundle.PART_SECONDS", 0.5)
    stand.engine.silent = True

    def hang() -> str:
        raise MemdError("the engine wrote no stacks within 3 s")

    stand.service.read_engine_stacks = hang
    stand.on_loop(lambda: setattr(stand.store, "_closed", True))
    real = stand.engine._take
    stand.engine._take = lambda message, port: None
    try:
        files = files_of(stand.http.get(PATH).content)
    finally:
        stand.engine._take = real
        stand.on_loop(lambda: setattr(stand.store, "_closed", False))
    problems = json.loads(files["manifest.json"])["problems"]
    assert "within 3 s" in problems["stacks-engine.txt"]
    assert {"requests.json", "prefixes.json", "events.json"} <= problems.keys()
    assert {"status.json", "metrics.txt", "snapshot.json", "log.txt"} <= files.keys()


def test_the_command_writes_a_file_of_its_owner(stand, tmp_path):
    file = tmp_path / "bundle.tar.gz"
    result = CliRunner().invoke(app, ["support-bundle", str(file), "--url", stand.url])
    assert result.exit_code == 0, result.output
    assert file.stat().st_mode & 0o777 == 0o600
    assert "status.json" in files_of(file.read_bytes())
    nowhere = tmp_path / "none" / "bundle.tar.gz"
    result = CliRunner().invoke(app, ["support-bundle", str(nowhere), "--url", stand.url])
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Authorization: Bearer abcdef123456", "Authorization: Bearer [removed]"),
        ("https://user:pw@host/x", "https://[removed]@host/x"),
        ('{"api_key": "abc", "b": 1}', '{"api_key": "[removed]", "b": 1}'),
        ("password=hunter2&x=1", "password=[removed]&x=1"),
        ("key sk-proj-abcdefghijklmnop1234 used", "key [removed] used"),
        ('{"prompt_tokens": 12, "token": 5}', '{"prompt_tokens": 12, "token": 5}'),
        ('{"keys_file": null, "password": null}', '{"keys_file": null, "password": null}'),
        ("thread memd-feed at /admin/v1/tokens", "thread memd-feed at /admin/v1/tokens"),
    ],
)
def test_what_looks_like_a_secret_is_removed_and_figures_stay(text, left):
    assert Scrubber().clean(text) == left


def test_known_secrets_are_removed_in_their_own_words(tmp_path: Path):
    url_file = tmp_path / "url"
    url_file.write_text(f"postgresql://memd:{PASSWORD}@db/memd\n")
    settings = build({"history.url_file": url_file, "alerts.channels": tmp_path / "none.yaml"})
    found = known_secrets(settings, {"MY_SECRET": "xyzzy-plugh", "HOME": "/root", "A_KEY": "abc"})
    assert {PASSWORD, "xyzzy-plugh"} <= found
    cleaned = Scrubber(found).clean(f"{PASSWORD} xyzzy-plugh abc /root")
    assert cleaned == f"{REMOVED} {REMOVED} abc /root"


def test_the_log_keeps_its_last_lines():
    tail = LogTail(lines=2)
    log = logging.Logger("x")
    log.addHandler(tail)
    for number in range(3):
        log.warning("line %d %s", number, "y" * 5000)
    lines = tail.text.splitlines()
    assert len(lines) == 2
    assert "line 2" in lines[1]
    assert len(lines[1]) == 2000
