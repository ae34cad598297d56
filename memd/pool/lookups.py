"""What the start of a sequence tells about the prefix cache."""

from collections.abc import Sequence

from memd.pool.counters import PoolCounters
from memd.pool.ghosts import Ghosts
from memd.pool.sequence import PoolSequence, PrefixMatch


def count_start(
    counters: PoolCounters,
    ghosts: Ghosts,
    sequence: PoolSequence,
    match: PrefixMatch,
    cached_tokens: int,
    keys: Sequence[int],
    page_tokens: int,
    now: float,
    regret_window_seconds: float,
) -> None:
    """Count a new sequence's lookup, and which of its missing pages were evicted lately.

    Args:
        keys: Of the full pages that it has to compute.
        now: Monotonic seconds.
    """
    for node in match.nodes:
        node.hit(now)
    regretted = ghosts.recall(keys, now, regret_window_seconds)
    counters.regretted += len(regretted)
    counters.evict_to_reuse_seconds.observe(*regretted)
    counters.count_lookup(
        len(sequence.tokens),
        cached_tokens - sequence.restored_tokens,
        sequence.restored_tokens,
        len(regretted) * page_tokens,
    )
