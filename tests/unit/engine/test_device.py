"""Which device the engine takes."""

import os
import subprocess
import sys

import pytest
import torch

from memd.config import build
from memd.engine.device import choose_device
from memd.errors import SettingsError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two; what was made the current device."""
    chosen: list[torch.device] = []

    def set_device(device: torch.device) -> None:
        if device.index is None:  # as torch does
            raise ValueError("expected a device with an index")
        chosen.append(device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return chosen


@pytest.mark.parametrize(("wanted", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_has_a_number_and_is_the_current_device(
    two_gpus: list[torch.device], wanted: str, index: int
) -> None:
    device = choose_device(build({"engine.device": wanted}))
    assert device == torch.device("cuda", index)
    assert two_gpus == [device]


def test_a_gpu_that_is_not_there(two_gpus: list[torch.device]) -> None:
    with pytest.raises(SettingsError, match="2 CUDA devices found"):
        choose_device(build({"engine.device": "cuda:2"}))


def test_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(build({})) == torch.device("cpu")


def test_as_many_threads_as_set() -> None:
    """Kernels too: numba makes it one for each core, for torch as well, when it is imported."""
    script = (
        "import numba, torch\n"
        "from memd.config import build\n"
        "from memd.engine.device import use_threads\n"
        "torch.get_num_threads()\n"  # torch asks the runtime only once
        "use_threads(build({'engine.threads': 1}), torch.device('cpu'))\n"
        "from memd_kernels.cpu.jit import threads\n"
        "print(threads(), torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)\n"
    )
    environment = {**os.environ, "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "1", "2"]
