"""Attention sinks: leading tokens that are seen besides a window, at a distance that is bounded."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sinks:
    """The first `count` tokens of every sequence stay visible behind the window.

    Keys are stored rotated to their positions in the text, so a query meets those in the window as
    it is. For the sinks it is turned to the position it has within what is seen, at most
    `count + window - 1`: its distance to them never exceeds what a model has been trained at.

    Attributes:
        count: Tokens, at least 1.
        q: The queries of a call, turned to `min(position, count + window - 1)`; its shape and
            dtype.

    Source:
        StreamingLLM (Xiao et al., arXiv 2309.17453, section 3). Two rotations of the query instead
        of new rotations of the cached keys are memd's.
    """

    count: int
    q: Tensor


def check_sinks(sinks: Sinks | None, q: Tensor, window: int | None) -> int:
    """The number of sinks; ValueError where they do not fit the queries or there is no window."""
    if sinks is None:
        return 0
    check_sink_count(sinks.count, window)
    if sinks.count < 1:
        raise ValueError(f"sinks has a count of {sinks.count}, must be at least 1")
    if (sinks.q.shape, sinks.q.dtype, sinks.q.device) != (q.shape, q.dtype, q.device):
        raise ValueError(
            f"q of sinks is {tuple(sinks.q.shape)} {sinks.q.dtype} on {sinks.q.device}, q "
            f"{tuple(q.shape)} {q.dtype} on {q.device}"
        )
    return sinks.count


def check_sink_count(count: int, window: int | None) -> None:
    """ValueError for a negative number of sinks, and for sinks without a window."""
    if count < 0 or (count and window is None):
        raise ValueError(f"sinks is {count} with window {window}; sinks need a window")
