"""Starts sequences: what they hold of what is cached, and the first pages of their own."""

from array import array
from collections.abc import Callable

from memd.errors import InvariantError, PoolExhausted
from memd.pool.allocator import Allocator
from memd.pool.blocks import Blocks
from memd.pool.claim import Claim
from memd.pool.counters import PoolCounters
from memd.pool.pages import Pages
from memd.pool.prefix_tree import PrefixTree
from memd.pool.residency import Residency
from memd.pool.retention import Retention
from memd.pool.sequence import PoolSequence, PrefixMatch, copies_of
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
        nothing = match.leading(0, self._tree.page_tokens)
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
        read = [node.page for node in match.nodes if node.page is not None]
        if len(read) < len(match.nodes):
            raise InvariantError(f"{request_id} admitted on pages that are not on the device")
        shared, page_tokens = self._retention.held_pages(match), self._tree.page_tokens
        wanted = self._retention.first_pages(len(tokens), match.num_tokens) - shared
        obtainable = self._allocator.obtainable_pages(read)
        tail, cached_tokens = match.tail, match.num_tokens
        if tail is not None and self._pages.is_cached(tail):
            if wanted + reserve_pages <= obtainable - 1:
                obtainable -= 1
            else:
                tail, cached_tokens = None, cached_tokens - match.tail_tokens
        if wanted + reserve_pages > obtainable and len(read) > shared:
            only = match.leading(shared, page_tokens)
            return self._start(request_id, tokens, namespace, only, reserve_pages, tenant)
        if wanted + reserve_pages > obtainable:
            self._counters.allocations["failed"] += 1
            raise PoolExhausted(
                f"{wanted} pages and {reserve_pages} in reserve, {obtainable} to be had"
            )
        if tail is not None:
            read.append(tail)
        if not self._allocator.make_room(wanted, read):
            raise PoolExhausted(f"{wanted} pages wanted, room for them is being made")
        self._pages.hold(read)
        try:
            new_pages = self._allocator.allocate(wanted, tenant, read)
        except PoolExhausted:
            self._blocks.put(self._pages.drop(read[::-1], self._clock()))
            raise
        held = read[:shared]  # under the names that they have now: making room may move pages
        node = match.nodes[shared - 1] if shared else self._tree.root(namespace)
        pages = held + new_pages
        sequence = PoolSequence(request_id, namespace, tokens, pages, node, shared, shared, tenant)
        sequence.bounded = match.bounded
        sequence.copies = copies_of(read[shared:], new_pages, cached_tokens, page_tokens)
        self._counters.copies += len(sequence.copies)
        if self._retention.packing is not None:
            sequence.packed_pages = self._blocks.count_packed(held)
            sequence.packing_stop = self._retention.packing.packed_pages(cached_tokens).stop
        restored = self._residency.restored.used(read[: len(match.nodes)]).items()
        sequence.restored_tokens = {tier: count * page_tokens for tier, count in restored}
        return sequence, cached_tokens
