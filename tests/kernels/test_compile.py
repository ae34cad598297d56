"""Every Triton kernel compiles for cards that are not here, and does not spill on sm_90."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("triton")

TUNED = "90"
ARCHITECTURES = ("80", TUNED, "100")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile(architecture: str, record_property: Callable[[str, object], None]) -> None:
    """In a process of its own: in this one, kernels may be interpreted.

    Every case for the architecture that the tables are tuned for, every kernel for the others.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "memd_kernels.compile", "--architecture", architecture]
    command += [] if architecture == TUNED else ["--first"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    record_property("table", done.stdout)  # registers and spills, shown at the end of the run
    assert done.returncode == 0, done.stdout + done.stderr
