"""How many pages a step may move so that it is hardly longer than others."""

import statistics
from collections import deque

SHARE = 0.1  # of the median step, which moves may add to one
RECENT_STEPS = 64
LEAST_STEPS = 8  # known before the pace follows them
# Moving any costs the host the plan, the table and a launch: fewer pages would hardly cost less.
LEAST_PAGES = 4


class MovePace:
    """Follows what moves have cost the host, which a step of a small model does not hide.

    All of it is known only once moves were made: the first are few.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._pages = float(LEAST_PAGES)

    def stepped(self, seconds: float) -> None:
        """A step has ended, after so long."""
        self._steps.append(seconds)

    def pages(self, most: int) -> int:
        """Pages for the next step, up to `most`; as many while hardly a step is known."""
        return most if len(self._steps) < LEAST_STEPS else min(most, int(self._pages))

    def moved(self, pages: int, seconds: float) -> None:
        """So many were moved in a step, which took the host so long."""
        if len(self._steps) < LEAST_STEPS:
            return
        allowed = SHARE * statistics.median(self._steps)
        # No faster than twofold, as one time may be a chance.
        fitting = pages * min(2.0, allowed / seconds if seconds else 2.0)
        self._pages = max(float(LEAST_PAGES), fitting)
