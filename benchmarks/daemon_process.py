"""A daemon of its own for a benchmark: started on a free port, ended with the block."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STOP_SECONDS = 60


@contextmanager
def serving(
    state_dir: Path, model: str, *assignments: str
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Run `memd serve` until the end of the block.

    Args:
        state_dir: Its state; its log is the file `log` in it.
        model: What `model.path` takes.
        assignments: `key=value` settings.

    Yields:
        Its address and its process.

    Raises:
        SystemExit: it does not start.
    """
    command = [sys.executable, "-m", "memd.cli", "serve", "--model", model, "--port", "0"]
    command += ["--state-dir", str(state_dir)]
    for assignment in assignments:
        command += ["--set", assignment]
    with (state_dir / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "memd serves" not in line:
                raise SystemExit(f"the daemon did not start:\n{(state_dir / 'log').read_text()}")
            yield line.split()[-1], process
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_SECONDS)
        finally:
            process.kill()
            process.wait()
