"""Where every thread and task is, written to the log on SIGUSR1: for a process that seems stuck.

Threads are written by a signal handler in C, so it works even when no Python code runs any more.
Stacks name files, lines and functions, never values.
"""

import asyncio
import faulthandler
import io
import logging
import signal
from collections.abc import Callable

STACKS_SIGNAL = signal.SIGUSR1
_STDERR = 2
_log = logging.getLogger(__name__)


def write_stacks() -> None:
    """Write the stacks of all threads, and of the tasks of the running loop."""
    faulthandler.dump_traceback(_STDERR)
    _log_tasks()


def write_threads_on_signal() -> None:
    """From now on the signal writes the stacks of all threads."""
    faulthandler.register(STACKS_SIGNAL, _STDERR)


def write_stacks_on_signal(then: Callable[[], None]) -> None:
    """From now on the signal also logs the tasks of the running loop.

    Args:
        then: Called on the loop after that.
    """

    def handle() -> None:
        _log_tasks()
        then()

    # What is registered later comes first and hands on to what was there before.
    faulthandler.unregister(STACKS_SIGNAL)
    asyncio.get_running_loop().add_signal_handler(STACKS_SIGNAL, handle)
    faulthandler.register(STACKS_SIGNAL, _STDERR, chain=True)


def _log_tasks() -> None:
    tasks, text = asyncio.all_tasks(), io.StringIO()
    for task in tasks:
        task.print_stack(file=text)
    _log.warning("%d tasks of the event loop:\n%s", len(tasks), text.getvalue().rstrip())
