"""Counts what new sequences found, and which of their missing pages were evicted lately."""

from collections.abc import Callable, Sequence

from memd.pool.counters import PoolCounters
from memd.pool.disk import DiskTier
from memd.pool.ghosts import Ghosts
from memd.pool.prefix_tree import Node
from memd.pool.sequence import PoolSequence


class Lookups:
    """Notes the lookup of a sequence when it starts.

    Args:
        counters, ghosts, disk: Of the pool.
        page_tokens: Tokens in a full page.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        counters: PoolCounters,
        ghosts: Ghosts,
        disk: DiskTier,
        page_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._counters = counters
        self._ghosts = ghosts
        self._disk = disk
        self._page_tokens = page_tokens
        self._clock = clock

    def count_start(
        self,
        sequence: PoolSequence,
        cached_tokens: int,
        nodes: Sequence[Node],
        keys: Sequence[bytes],
        regret_window_seconds: float,
    ) -> None:
        """Count hits, misses and regrets.

        Args:
            cached_tokens: Of the sequence, at its start.
            nodes: Of the pages it found.
            keys: Of the full pages it has to compute.
            regret_window_seconds: How long after an eviction asking again counts as regret.
        """
        now = self._clock()
        for node in nodes:
            node.hit(now)
            self._disk.used(node)
        regretted = self._ghosts.recall(keys, now, regret_window_seconds)
        self._counters.regretted += len(regretted)
        self._counters.evict_to_reuse_seconds.observe(*regretted)
        self._counters.count_lookup(
            len(sequence.tokens),
            cached_tokens,
            sequence.restored_tokens,
            len(regretted) * self._page_tokens,
        )
