"""benchmarks/serve.py against a real daemon with a tiny model."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Daemon, serving
from tiny import write_model

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve.py"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny")
    limits = ("memory.limit=32768 tokens",)
    with serving(tmp_path_factory.mktemp("state"), str(model), *limits) as served:
        yield served
        served.assert_idle()


def load(url: str, *options: str, fails: bool = False) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--url", url, "--format", "json", *options]
    # Started as people start it: with its own folder on the path.
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == fails, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("mix", "cached"), [("chat", (0.3, 0.9)), ("prefix", (0.3, 0.9)), ("random", (0.0, 0.1))]
)
def test_a_mix(daemon: Daemon, mix: str, cached: tuple[float, float]) -> None:
    generated = daemon.metric("memd_generated_tokens_total")
    options = ("--mix", mix, "--requests", "24", "--rate", "60", "--burst", "4", "--think", "0.05")
    result = load(daemon.url, *options, "--prompt-tokens", "20", "--output-tokens", "8")
    assert result["requests"] == 24
    assert result["failures"] == {}
    assert result["output_tokens"] == daemon.metric("memd_generated_tokens_total") - generated
    assert cached[0] <= result["cached_share"] <= cached[1]
    for name in ("first_token_seconds", "between_tokens_seconds", "end_to_end_seconds"):
        # On a busy machine two tokens may arrive in one piece, and more than half of them may.
        assert 0 <= result[name]["p50"] <= result[name]["p95"] <= result[name]["p99"]
        assert result[name]["p99"] > 0
    assert result["end_to_end_seconds"]["p99"] <= result["seconds"]


def test_a_seed_repeats_the_load(daemon: Daemon) -> None:
    options = ("--mix", "random", "--requests", "8", "--rate", "inf", "--output-tokens", "4")
    sizes = [
        {name: result[name] for name in ("prompt_tokens", "output_tokens")}
        for result in (load(daemon.url, *options, "--seed", seed) for seed in ("1", "1", "2"))
    ]
    assert sizes[0] == sizes[1] != sizes[2]


def test_failures_are_told_by_kind(daemon: Daemon) -> None:
    options = ("--mix", "random", "--requests", "3", "--rate", "inf", "--prompt-tokens", "4")
    result = load(daemon.url, *options, "--model", "nobody", fails=True)
    assert result["failures"] == {"http 404": 3}
    assert result["output_tokens"] == 0
    assert result["cached_share"] is None
    assert result["first_token_seconds"] == {"p50": None, "p95": None, "p99": None}
    result = load("http://127.0.0.1:9", *options, "--model", "nobody", fails=True)
    assert result["failures"] == {"ConnectionRefusedError": 3}
