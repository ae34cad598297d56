"""`memd eval`: what it prints, and how it ends."""

import json
from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return str(tiny.write_model(directory, max_position=512))


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("MEMD_ENGINE_THREADS", "1")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("Keys and values, packed. " * 20, encoding="utf-8")
    return str(path)


def test_rows_as_json(memd, model, text):
    options = ("--full-precision-tokens", "16", "--recent-tokens", "16", "--tokens", "300")
    result = memd("eval", model, "--text", text, "--kv", "int8,full", "--format", "json", *options)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["kv"] for row in report["rows"]] == ["int8", "full"]
    assert (report["model"], report["tokens"], report["page_tokens"]) == ("tiny", 300, 64)
    int8, full = report["rows"]
    assert (int8["full_precision_tokens"], int8["recent_tokens"]) == (16, 16)
    assert int8["packed_pages"] > 0
    assert 0 < int8["kv_bytes"] < full["kv_bytes"]
    short = memd(
        *("eval", model, "--text", text, "--kv", "int8", "--set", "memory.page_tokens=16"),
        *("--format", "json", *options),
    )
    assert json.loads(short.stdout)["page_tokens"] == 16


def test_a_table_for_people(memd, model, text):
    result = memd("eval", model, "--text", text, "--kv", "full", "--window", "64")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "tiny: 500 tokens, float32, pages of 16"
    assert lines[1].split()[:4] == ["kv", "holds", "perplexity", "rise"]
    assert lines[2].split()[:2] == ["full", "64"]


def test_drop_policies_beside_each_other(memd, model, text):
    more = ["--budget", "128", "--drop", "recency,attention_share", "--sinks", "4"]
    result = memd("eval", model, "--text", text, "--format", "json", *more)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["kv"], row["budget"], row["drop"]) for row in rows] == [
        ("full", 128, "recency"),
        ("full", 128, "attention_share"),
    ]
    assert [row["full_pages"] for row in rows] == [8, 8]
    assert all(row["divergence"] > 0 for row in rows)
    assert rows[0]["perplexity"] != rows[1]["perplexity"]
    result = memd("eval", model, "--text", text, *more)
    assert "128 by attention share" in result.stdout


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--kv", "int3"], ["--kv", "'int3'", "full, int8, int4, fp8"]),
        (["--kv", "int8,int8"], ["--kv", "int8 is there twice"]),
        (["--tokens", "513"], ["--tokens", "513", "512"]),
        (["--tokens", "1"], ["--tokens", "1 is not from 2 to 512"]),
        (["--tokens", "501"], ["--text", "500 tokens", "501"]),
        (["--window", "0"], ["--window", "0 is below 1"]),
        (["--budget", "20"], ["--budget", "needs 32 tokens or more"]),
        (["--budget", "64", "--window", "64"], ["--budget", "window"]),
        (["--budget", "64", "--kv", "int8"], ["--budget", "full pages only, not int8"]),
        (["--budget", "64", "--drop", "lru"], ["--drop", "'lru'", "recency, attention_share"]),
        (["--budget", "64", "--drop", "recency,recency"], ["--drop", "recency is there twice"]),
        (["--drop", "recency"], ["--drop", "there is none"]),
        (["--sinks", "4"], ["--sinks", "no window or budget"]),
        (["--recent-tokens", "-1"], ["--recent-tokens", "-1 is below 0"]),
        (["--set", "memory.page_tokens=24"], ["--kv", "page_tokens is 24", "power of two"]),
        (["--set", "engine.device=cuda:7"], ["engine.device", "cuda:7"]),
    ],
    ids=" ".join,
)
def test_wrong_usage_names_field_value_and_limit(memd, model, text, options, named):
    result = memd("eval", model, "--text", text, *options)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    said = " ".join(result.stderr.replace("│", " ").split())
    assert all(word in said for word in named), said


def test_a_text_that_is_not_there(memd, model):
    result = memd("eval", model, "--text", "/nonexistent.txt")
    assert result.exit_code == 2
    assert "--text" in result.stderr


def test_an_unknown_model(memd, text):
    result = memd("eval", "/nonexistent", "--text", text)
    assert result.exit_code == 1
    assert "/nonexistent is no directory" in result.stderr
