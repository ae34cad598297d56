"""Starts sequences: what they hold of what is cached, and the first pages of their own."""

from array import array
from collections.abc import Callable
from dataclasses import replace

from memd.errors import InvariantError, PoolExhausted
from memd.pool.allocator import Allocator
from memd.pool.blocks import Blocks
from memd.pool.claim import Claim
from memd.pool.counters import PoolCounters
from memd.pool.pages import Pages
from memd.pool.prefix_tree import PrefixTree
from memd.pool.residency import Residency
from memd.pool.retention import Retention
from memd.pool.sequence import PageCopy, PoolSequence, PrefixMatch
from memd.types import RequestId


class Admission:
    """Gives a sequence its first pages, or nothing.

    Args:
        allocator, retention, residency, pages, blocks, claimed, tree, counters: Of one pool.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        allocator: Allocator,
        retention: Retention,
        residency: Residency,
        pages: Pages,
        blocks: Blocks,
        claimed: Claim,
        tree: PrefixTree,
        counters: PoolCounters,
        clock: Callable[[], float],
    ) -> None:
        self._allocator = allocator
        self._retention = retention
        self._residency = residency
        self._pages = pages
        self._blocks = blocks
        self._claimed = claimed
        self._tree = tree
        self._counters = counters
        self._clock = clock

    def start(
        self,
        request_id: RequestId,
        tokens: "array[int]",
        namespace: str,
        match: PrefixMatch,
        reserve_pages: int,
        tenant: int,
        alone: bool,
    ) -> tuple[PoolSequence, int]:
        """A sequence with its first pages, and how many of its tokens are cached; see `Pool.admit`.

        Args:
            alone: Nothing else runs. Packed pages that match share their blocks with others, and
                may so take more room than the limit leaves: then nothing of them is used.

        Raises:
            PoolExhausted: pages for tokens and reserve cannot be had now.
        """
        try:
            return self._start(request_id, tokens, namespace, match, reserve_pages, tenant)
        except PoolExhausted:
            if not alone or not self._residency.count_packed(match.nodes):
                raise
        self._claimed.release()
        nothing = replace(match, nodes=[], tail=None, tail_tokens=0, num_tokens=0)
        return self._start(request_id, tokens, namespace, nothing, 0, tenant)

    def _start(
        self,
        request_id: RequestId,
        tokens: "array[int]",
        namespace: str,
        match: PrefixMatch,
        reserve_pages: int,
        tenant: int,
    ) -> tuple[PoolSequence, int]:
        held = [node.page for node in match.nodes if node.page is not None]
        if len(held) < len(match.nodes):
            raise InvariantError(f"{request_id} admitted on pages that are not on the device")
        wanted = self._retention.first_pages(len(tokens), match.num_tokens) - len(held)
        obtainable = self._allocator.obtainable_pages(held)
        tail, cached_tokens = match.tail, match.num_tokens
        if tail is not None and self._pages.is_cached(tail):
            if wanted + reserve_pages <= obtainable - 1:
                obtainable -= 1
            else:
                tail, cached_tokens = None, cached_tokens - match.tail_tokens
        if wanted + reserve_pages > obtainable:
            self._counters.allocations["failed"] += 1
            raise PoolExhausted(
                f"{wanted} pages and {reserve_pages} in reserve, {obtainable} to be had"
            )
        if tail is not None:
            held.append(tail)
        if not self._allocator.make_room(wanted, held):
            raise PoolExhausted(f"{wanted} pages wanted, room for them is being made")
        self._pages.hold(held)
        try:
            new_pages = self._allocator.allocate(wanted, tenant, held)
        except PoolExhausted:
            self._blocks.put(self._pages.drop(held[::-1], self._clock()))
            raise
        copy = None
        if tail is not None:
            copy = PageCopy(held.pop(), new_pages[0], match.tail_tokens)
            self._counters.copies += 1
        node = match.nodes[-1] if match.nodes else self._tree.root(namespace)
        sequence = PoolSequence(
            request_id,
            namespace,
            tokens,
            held + new_pages,
            node,
            len(held),
            len(held),
            tenant,
            copy,
        )
        if self._retention.packing is not None:
            sequence.packed_pages = self._blocks.count_packed(held)
            sequence.packing_stop = self._retention.packing.packed_pages(cached_tokens).stop
        restored = self._residency.restored.used(held).items()
        page_tokens = self._tree.page_tokens
        sequence.restored_tokens = {tier: count * page_tokens for tier, count in restored}
        return sequence, cached_tokens
