"""Work on a thread of its own, for what may hang: a download, a mail server."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result], name: str) -> Result:
    """Like asyncio.to_thread, on a thread that does not hold up the exit.

    Args:
        work: Called once; what it raises is raised here.
        name: Of the thread.
    """
    future: Future[Result] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
