"""What a machine that others keep busy adds to any measured time."""

from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def starved_seconds() -> float:
    """Seconds for which this thread has been ready and without a core; 0 where that is not told."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except OSError:
        return 0.0
