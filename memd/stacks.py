"""Where every thread and task is, written to the log on SIGUSR1: for a process that seems stuck.

Threads are written by a signal handler in C, so it works even when no Python code runs any more.
Stacks name files, lines and functions, never values.
"""

import asyncio
import faulthandler
import io
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR1
FILE_SIGNAL = signal.SIGUSR2
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


def write_threads_to_file_on_signal(path: Path) -> None:
    """From now on another signal adds the stacks of all threads to a file, for who asks for them.

    Args:
        path: Of the file; kept open, as the handler can open nothing.
    """
    faulthandler.register(FILE_SIGNAL, path.open("a"))


def threads_text() -> str:
    """The stacks of this process's threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )


def tasks_text() -> str:
    """The stacks of the running loop's tasks."""
    text = io.StringIO()
    for task in asyncio.all_tasks():
        task.print_stack(file=text)
    return text.getvalue()


def _log_tasks() -> None:
    count = len(asyncio.all_tasks())
    _log.warning("%d tasks of the event loop:\n%s", count, tasks_text().rstrip())
