"""The settings tree: sources, units, and what is refused with which words."""

from pathlib import Path
from typing import get_args

import pytest
from memd_kernels.formats import FORMAT_NAMES, PackedFormat

from memd.config import LIVE_KEYS, build, dump, flatten, leaves
from memd.config_kv import LEAST_PACKED_PAGE_TOKENS
from memd.config_sources import load
from memd.errors import SettingsError
from memd.types import KVFormat
from memd.units import format_share, format_size, parse_duration, parse_share, parse_size

SEED = """
memory:
  block_size: 16MB
  watermark:
    high: 90%  # reclaim starts
    low: 70%   # reclaim stops
  prefetch:
    window: 5
    lookahead: 3
"""


def test_the_seeds_file_is_valid_and_says_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "memd.yaml"
    file.write_text(SEED)
    assert load(file, environment={}) == load(environment={})


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "memd.toml"
    file.write_text('[memory.watermark]\nhigh = "80%"\nlow = "10%"\n[model]\nname = "file"\n')
    environment = {"MEMD_MEMORY_WATERMARK_LOW": "20%", "MEMD_MODEL__NAME": "variable"}
    settings = load(file, ["model.name=flag"], environment)
    assert settings.memory.watermark.high == 0.8
    assert settings.memory.watermark.low == 0.2
    assert settings.model.name == "flag"


def test_the_dump_is_read_back_as_it_was() -> None:
    settings = load(assignments=["memory.limit=1024 tokens", "memory.host.limit=2GiB"])
    assert build(flatten(dump(settings))) == settings


@pytest.mark.parametrize(
    ("assignment", "key"),
    [
        ("memory.watermark.high=60%", "memory.watermark"),
        ("memory.watermark.high=.nan", "memory.watermark.high"),
        ("memory.watermark.high='0.9'", "memory.watermark.high"),
        ("memory.watermark.high=90", "memory.watermark.high"),
        ("memory.watermark.low=0%", "memory.watermark"),
        ("memory.page_tokens=0", "memory.page_tokens"),
        ("memory.page_tokens=many", "memory.page_tokens"),
        ("memory.limit=0%", "memory.limit"),
        ("memory.limit=-3 tokens", "memory.limit"),
        ("memory.limit=16", None),
        ("memory.host.limit=lots", "memory.host.limit"),
        ("memory.regret_window=-1s", "memory.regret_window"),
        ("memory.colour=red", "memory.colour"),
        ("engine.device=tpu", "engine.device"),
        ("server.port=70000", "server.port"),
        ("kv.format=int4", None),
        ("kv.format=int2", "kv.format"),
        ("kv.full_precision_tokens=-1", "kv.full_precision_tokens"),
        ("kv.recent_tokens=many", "kv.recent_tokens"),
    ],
)
def test_what_is_wrong_is_named(assignment: str, key: str | None) -> None:
    if key is None:
        load(assignments=[assignment], environment={})
        return
    with pytest.raises(SettingsError) as caught:
        load(assignments=[assignment], environment={})
    assert list(caught.value.problems) == [key]


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(("tokens", "fits"), [(15, False), (16, True), (48, False), (256, True)])
def test_pages_that_cannot_be_packed(form: str, tokens: int, fits: bool) -> None:
    settings = [f"kv.format={form}", f"memory.page_tokens={tokens}"]
    if fits:
        assert load(assignments=settings, environment={}).memory.page_tokens == tokens
        return
    with pytest.raises(SettingsError) as caught:
        load(assignments=settings, environment={})
    problem = caught.value.problems["memory.page_tokens"]
    assert str(tokens) in problem
    assert "power of two from 16 on" in problem
    assert form in problem
    load(assignments=[settings[1]], environment={})  # full pages may have any number


def test_formats_are_those_of_the_kernels() -> None:
    assert get_args(KVFormat) == ("full", *FORMAT_NAMES)
    for name in FORMAT_NAMES:
        PackedFormat(name, LEAST_PACKED_PAGE_TOKENS, 8)
        with pytest.raises(ValueError, match="page_tokens"):
            PackedFormat(name, LEAST_PACKED_PAGE_TOKENS // 2, 8)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        load(assignments=["model.max_len=1", "server.port=-1", "x.y=1"], environment={})
    assert set(caught.value.problems) == {"model.max_len", "server.port", "x"}


def test_live_keys_are_settings() -> None:
    assert leaves().keys() >= LIVE_KEYS
    assert {"memory.watermark.high", "memory.watermark.low", "memory.host.limit"} <= LIVE_KEYS


@pytest.mark.parametrize(
    ("text", "size"),
    [("16MB", 16_000_000), ("16MiB", 2**24), ("1.5GB", 1_500_000_000), (4096, 4096), ("7 B", 7)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["16", "MB", "0MB", "-1MB", "1.5B", "16 parsecs", True, 1.5])
def test_sizes_that_are_none(text: object) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_size(text)  # type: ignore[arg-type]


def test_shares_and_durations() -> None:
    assert parse_share("12.5%") == 0.125
    assert parse_share(1) == 1.0
    assert parse_duration("250ms") == 0.25
    assert parse_duration("2h") == 7200
    for text in ("101%", "-1%", "0.9", "nan", float("inf"), True):
        with pytest.raises(ValueError, match=r"\S"):
            parse_share(text)
    for text in ("10", "5 weeks", "-1s", float("nan")):
        with pytest.raises(ValueError, match=r"\S"):
            parse_duration(text)


def test_formats_for_people() -> None:
    assert format_size(16 * 2**20) == "16.0 MiB"
    assert format_size(512) == "512 B"
    assert format_share(0.9) == "90%"
    assert format_share(0.125) == "12.5%"


def test_a_budget_and_packed_pages_are_refused_together():
    with pytest.raises(SettingsError) as caught:
        build({"kv.format": "int8", "kv.budget": 512})
    assert "kv.format is int8" in caught.value.problems["kv.budget"]
    assert build({"kv.format": "int8", "kv.window": 512}).kv.window == 512
