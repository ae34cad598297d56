"""What a machine that others keep busy adds to any measured time."""

from contextlib import suppress
from pathlib import Path


def starved_seconds(*pids: int | None) -> float:
    """Seconds for which this thread, and the first of each process, have been ready and without a
    core; 0 where that is not told.
    """
    places = ["thread-self", *(str(pid) for pid in pids if pid is not None)]
    seconds = 0.0
    for place in places:
        with suppress(OSError):
            seconds += int(Path(f"/proc/{place}/schedstat").read_text().split()[1]) / 1e9
    return seconds
