"""How long sequences wait for memory, by cause. A wait belongs to one cause at a time."""

from typing import get_args

from memd.engine.request import Request
from memd.histogram import LATENCY, HistogramCounts
from memd.types import StallCause


class Stalls:
    """Counts stalls; the request knows which one it is in.

    Attributes:
        seconds: Ended stalls by cause.
    """

    def __init__(self) -> None:
        self.seconds = {cause: HistogramCounts(LATENCY) for cause in get_args(StallCause)}

    def begin(self, request: Request, cause: StallCause, now: float) -> None:
        """A request waits from now on; one that was preempted waits for that until it goes on."""
        if request.stall is None:
            request.stall = cause, now
        elif request.stall[0] != cause and not request.preemptions:
            self.end(request, now)
            request.stall = cause, now

    def end(self, request: Request, now: float) -> None:
        """A request goes on."""
        if request.stall is not None:
            cause, since = request.stall
            self.seconds[cause].observe(now - since)
            request.stall_seconds += now - since
            request.stall = None
