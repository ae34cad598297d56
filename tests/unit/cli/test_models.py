"""`memd models` without a network."""

import json

import pytest


@pytest.fixture(autouse=True)
def _empty_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_list_tells_what_is_not_fetched(memd, tmp_path):
    assert "smollm2-135m  demo    93.8 MiB  not fetched" in memd("models", "list").stdout
    demo = json.loads(memd("models", "list", "--format", "json").stdout)[0]
    assert (demo["name"], demo["path"]) == ("smollm2-135m", None)


def test_a_model_that_is_there_is_fetched_at_once(memd, tmp_path):
    path = tmp_path / "memd" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(98_362_432)
    assert memd("models", "fetch", "smollm2-135m").stdout == f"{path}\n"
    assert str(path) in memd("models", "list").stdout


@pytest.mark.parametrize("arguments", [("fetch", "no name"), ("inspect", "/nonexistent")])
def test_unknown_models(memd, arguments):
    result = memd("models", *arguments)
    assert result.exit_code == 1
    assert arguments[1] in result.stderr
