"""An export is a settings file that says exactly what is in force."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memd.config import LIVE_KEYS, Settings, build, dump, flatten, leaves
from memd.config_export import export
from memd.config_sources import Sources, load
from memd.config_words import allowed, exact_size, written
from memd.errors import SettingsError

TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model.path": TEXTS | st.sampled_from(["null", "1", "yes", "a: b", "#", "'", '"', "\x7f", "-"]),
    "model.name": st.none() | TEXTS,
    "memory.limit": st.sampled_from(["80%", "1024 tokens"]) | st.integers(1, 2**50),
    "memory.block_size": st.integers(1, 2**40),
    "memory.watermark.high": st.floats(0.71, 1),
    "memory.watermark.low": st.floats(0.001, 0.7),
    "memory.host.limit": st.just("auto") | st.integers(0, 2**45),
    "memory.regret_window": st.floats(0, 1e9),
    "engine.max_batch_tokens": st.just("auto") | st.integers(16, 2**40),
    "server.uds_mode": st.sampled_from(["0600", "0660"]),
    "server.generation_timeout": st.none() | st.floats(0.001, 1e6),
    "debug.faults": st.booleans(),
    "tenants": st.sampled_from([[], [{"name": "a", "quota": "20%"}, {"name": "b", "weight": 2.5}]]),
    "log_level": st.sampled_from(["debug", "info"]),
}


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries({}, optional=VALUES), st.sampled_from(["yaml", "toml"]), st.booleans())
def test_what_is_exported_is_read_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, flat: dict[str, Any], form: Any, everything: bool
) -> None:
    chosen = build(flat)
    file = tmp_path_factory.getbasetemp() / f"export.{form}"
    file.write_text(export(chosen, form, "Settings", everything), encoding="utf-8")
    assert load(file, environment={}) == chosen


def test_an_export_is_written_for_people() -> None:
    chosen = build(
        {"memory.watermark.high": 0.85, "memory.block_size": "8MiB", "log_level": "debug"}
    )
    assert export(chosen, "yaml", "Settings of memd") == (
        "# Settings of memd\nmemory:\n  block_size: 8MiB\n  watermark:\n    high: 85%\n"
        "log_level: debug\n"
    )
    assert export(chosen, "toml", "Settings of memd") == (
        '# Settings of memd\nlog_level = "debug"\n\n[memory]\nblock_size = "8MiB"\n\n'
        '[memory.watermark]\nhigh = "85%"\n'
    )
    assert export(Settings(), "yaml", "Settings") == "# Settings\n"
    everything = export(Settings(), "yaml", "Settings", everything=True)
    assert "regret_window: 60s" in everything
    assert "limit: auto" in everything


def test_what_a_setting_may_be() -> None:
    high = allowed("memory.watermark.high")
    assert (high["type"], high["unit"], high["minimum"], high["maximum"]) == (
        *("number", "share of one", 0, 1),
    )
    tokens = allowed("engine.max_batch_tokens")
    assert (tokens["type"], tokens["unit"], tokens["minimum"], tokens["choices"]) == (
        *("integer", "tokens", 16, ["auto"]),
    )
    assert allowed("memory.prefetch.window")["unit"] == "steps"
    assert allowed("memory.reclaim_pages_per_step")["unit"] == "pages per step"
    assert allowed("history.sample_every")["minimum"] == 1
    assert allowed("server.generation_timeout")["nullable"]
    assert allowed("log_level")["choices"] == ["debug", "info", "warning", "error"]


@pytest.mark.parametrize("key", sorted(LIVE_KEYS))
def test_bounds_are_those_that_validation_has(key: str) -> None:
    bounds = allowed(key)
    if bounds["type"] not in ("integer", "number"):
        return
    step = 1 if bounds["type"] == "integer" else 0.001
    for bound, outside in ((bounds["minimum"], -step), (bounds["maximum"], step)):
        if bound is not None:
            with pytest.raises(SettingsError):
                build({key: bound + outside})
    assert bounds["unit"] is not None


def test_defaults_as_people_write_them() -> None:
    defaults = flatten(dump(Settings()))
    shown = {key: written(key, defaults[key]) for key in leaves()}
    assert shown["memory.watermark.high"] == "90%"
    assert shown["memory.regret_window"] == "60s"
    assert (shown["memory.host.limit"], shown["model.name"]) == ("auto", "none")
    assert written("memory.host.limit", 2 * 2**30) == "2GiB"
    assert written("memory.limit", 6 * 10**6) == "6MB"
    assert written("memory.limit", "1024 tokens") == "1024 tokens"
    assert written("tenants", [{"name": "a"}]) == '[{"name": "a"}]'
    assert [exact_size(size) for size in (0, 1, 1000, 1024, 1025)] == [
        *("0", "1B", "1KB", "1KiB", "1025B"),
    ]


def test_each_key_knows_its_source(tmp_path: Path) -> None:
    file = tmp_path / "memd.yaml"
    file.write_text("memory.watermark.high: 80%\nmemory.watermark.low: 10%\nmodel.name: file\n")
    environment = {"MEMD_MEMORY_WATERMARK_LOW": "20%", "MEMD_MODEL__NAME": "variable"}
    loaded = Sources(file, ["model.name=flag"], environment).read()
    assert loaded.origins.keys() == leaves().keys()
    chosen = ("memory.watermark.high", "memory.watermark.low", "model.name", "log_level")
    assert [loaded.origins[key] for key in chosen] == ["file", "environment", "flag", "default"]


def test_errors_of_a_file_do_not_quote_it(tmp_path: Path) -> None:
    file = tmp_path / "memd.yaml"
    file.write_text("history:\n  url: a: secret: word\n")
    with pytest.raises(SettingsError) as caught:
        load(file, environment={})
    assert caught.value.problems == {
        str(file): "mapping values are not allowed here in line 2, column 9"
    }
    with pytest.raises(SettingsError, match="put it in quotes"):
        load(assignments=["model.path=: {"], environment={})
