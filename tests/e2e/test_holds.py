"""benchmarks/holds.py as far as a CPU and a few seconds go."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "holds.py"


def test_shared_prompts_over_a_model_with_random_weights() -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--shape", "tiny"]
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [*command, "--parts", "shared"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])["shared"]
    assert told["violations"] == []
    assert told["texts"] == "64 of 64"
    assert told["hits_of_possible"] >= 0.9
