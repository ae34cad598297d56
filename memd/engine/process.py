"""The engine process: `python -m memd.engine.process --address ipc://...`.

Loads what the first message says, serves until told to shut down, and never outlives its parent.
"""

import argparse
import ctypes
import gc
import logging
import os
import signal
import sys
from pathlib import Path

from memd.engine.messages import Failed, Start, StepReport
from memd.engine.port import ZmqEnginePort
from memd.errors import MemdError
from memd.imports import kept
from memd.stacks import write_threads_on_signal, write_threads_to_file_on_signal

logger = logging.getLogger("memd.engine")

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the process; returns its exit code."""
    write_threads_on_signal()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--parent", type=int, required=True, help="pid of the api process")
    parser.add_argument("--stacks", type=Path, help="file for the stacks that are asked for")
    arguments = parser.parse_args()
    if arguments.stacks is not None:
        write_threads_to_file_on_signal(arguments.stacks)
    _tie_to_parent(arguments.parent)
    # The api process drains and then says when to stop; a signal to the group is not for us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    port = ZmqEnginePort(arguments.address)
    try:
        return _serve(port)
    finally:
        port.close()


def _serve(port: ZmqEnginePort) -> int:
    with kept():
        from memd.engine.build import load_engine

    start = _await_start(port)
    logging.basicConfig(
        level=str(start.settings.get("log_level", "info")).upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        engine, ready = load_engine(port, start)
        gc.freeze()  # what is loaded stays: no collection, even the one at exit, looks at it
        port.send(ready, StepReport(snapshot=engine.snapshot()))
        engine.run()
    except MemdError as error:
        logger.error("%s", error)
        port.send(Failed(str(error)))
        return 1
    except Exception as error:
        logger.exception("the engine ends")
        port.send(Failed(f"internal error in the engine ({type(error).__name__}); see the log"))
        return 1
    return 0


def _await_start(port: ZmqEnginePort) -> Start:
    while True:
        for message in port.receive(timeout_seconds=1.0):
            if isinstance(message, Start):
                return message


def _tie_to_parent(parent: int) -> None:
    """Have the kernel end this process when its parent does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the api process is gone")


if __name__ == "__main__":
    sys.exit(main())
