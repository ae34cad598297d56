"""What `memd serve` and `memd up` do before the daemon runs."""

from pathlib import Path

import pytest

from memd.cli.serve import load_settings


def test_options_come_after_file_environment_and_set(tmp_path, monkeypatch):
    file = tmp_path / "memd.yaml"
    file.write_text("server: {port: 1000}\nmemory: {watermark: {high: 80%, low: 20%}}\n")
    monkeypatch.setenv("MEMD_SERVER_PORT", "2000")
    monkeypatch.setenv("MEMD_MEMORY_WATERMARK_LOW", "30%")
    loaded = load_settings(
        model="C: #1 {odd}.gguf",
        port=4000,
        host="::1",
        state_dir=Path("/var/lib/memd"),
        config=file,
        assignments=["server.port=3000", "memory.limit=1024 tokens"],
    )
    settings = loaded.settings
    assert (loaded.origins["server.port"], loaded.sources.file) == ("flag", file)
    assert settings.model.path == "C: #1 {odd}.gguf"
    assert (settings.server.host, settings.server.port) == ("::1", 4000)
    assert (settings.memory.watermark.high, settings.memory.watermark.low) == (0.8, 0.3)
    assert settings.memory.limit == "1024 tokens"
    assert settings.state_dir == Path("/var/lib/memd")


def test_every_problem_is_named(memd):
    result = memd("serve", "--set", "memory.watermark.high=NaN", "--set", "nonsense=1")
    assert result.exit_code == 2
    assert "memory.watermark.high: " in result.stderr
    assert "nonsense: unknown setting" in result.stderr


@pytest.mark.parametrize("command", ["up", "serve"])
def test_a_host_that_others_reach_is_refused(memd, command):
    result = memd(command, "--host", "0.0.0.0")
    assert result.exit_code == 2
    assert "0.0.0.0" in result.stderr


def test_up_where_a_memd_answers_is_fine(daemon, memd):
    daemon.answers["GET /version"] = (200, {"version": "0.1.0"})
    result = memd("up", "--port", daemon.url.rpartition(":")[2])
    assert result.exit_code == 0
    assert result.stdout == f"memd 0.1.0 already answers at {daemon.url}\n"


def test_up_where_another_program_answers_fails(daemon, memd):
    result = memd("up", "--port", daemon.url.rpartition(":")[2])
    assert result.exit_code == 1
    assert daemon.url in result.stderr
