"""Every Triton kernel compiles for cards that are not here, and does not spill on sm_90."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

ARCHITECTURES = ("80", "90", "100")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile(architecture: str) -> None:
    """In a process of its own: in this one, kernels may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "memd_kernels.compile", "--architecture", architecture]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    sys.stdout.write(done.stdout)  # registers and spills, with `pytest -s` or on failure
    assert done.returncode == 0, done.stdout + done.stderr
