"""The pool: who holds which page. The scheduler's only door to KV memory.

Pure bookkeeping in plain Python: no torch, no threads, no clock but the one passed in. The engine
thread is its only user. Each operation of the door changes everything it says or nothing.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from memd.errors import InvariantError, PoolExhausted
from memd.pool.admission import Admission
from memd.pool.allocator import Allocator
from memd.pool.announcements import Announcements
from memd.pool.blocks import Blocks
from memd.pool.bring_up import BringUp
from memd.pool.claim import Claim
from memd.pool.counters import PoolCounters
from memd.pool.defrag import PageMove, PageMover
from memd.pool.disk import DiskTier
from memd.pool.disk_traffic import DiskTraffic
from memd.pool.files import DiskReport
from memd.pool.flush import drop_all, drop_prefix
from memd.pool.ghosts import Ghosts
from memd.pool.host_slots import HostSlots
from memd.pool.layout import KVLayout
from memd.pool.lookups import Lookups
from memd.pool.lru import LruEviction
from memd.pool.misses import miss_of
from memd.pool.packer import Packer
from memd.pool.packing import PackingSchedule
from memd.pool.pages import Pages
from memd.pool.pins import Pins
from memd.pool.prefix_tree import Node, PrefixTree
from memd.pool.publisher import Publisher
from memd.pool.relocate import Relocator
from memd.pool.residency import Residency
from memd.pool.retention import Retention
from memd.pool.sequence import PoolSequence, PrefixMatch
from memd.pool.tenants import Tenants
from memd.pool.watermarks import Watermarks
from memd.types import BlockBacking, PageId, RequestId, TransferId


class Pool:
    """Pages of one layout, shared by prefix, evicted by LRU between two watermarks.

    Args:
        layout: Byte arithmetic of pages and blocks.
        capacity_pages: Most pages the pool may hold at first; later its `PoolLimit` says.
        backing: Memory behind blocks.
        watermarks: The marks in force.
        clock: Monotonic seconds.
        regret_window_seconds: How long after an eviction asking again counts as regret.
        max_host_pages: Room on the host; how much of it is used is `host_limit_bytes`, at first 0.

    Attributes:
        packing: Which pages are packed, if the layout has packed ones; set before any sequence.
        mover: Copies pages on the device.

    Invariants:
        free + active + cached + pinned + quarantined == capacity, in pages, between any two calls.
        These count places, as the blocks are cut into full and packed pages at the time; what can
        be had as full pages is `obtainable_pages`.
        A page's references are the sequences that list it, copies that need it, and the claim.
        If a page is held or pinned, so are the pages before it in the tree; so every cached page
        can be evicted, once a copy of it to the host that is under way has ended.
    """

    def __init__(
        self,
        layout: KVLayout,
        capacity_pages: int,
        backing: BlockBacking,
        watermarks: Watermarks,
        clock: Callable[[], float],
        regret_window_seconds: float = 60.0,
        max_host_pages: int = 0,
    ) -> None:
        self.layout = layout
        self.configured_pages = capacity_pages  # what requests may count on; see `PoolLimit`
        self.watermarks = watermarks
        self.regret_window_seconds = regret_window_seconds
        packed = layout.packed_pages_per_block
        self.blocks = Blocks(capacity_pages, layout.pages_per_block, backing, clock, packed)
        self.lru = LruEviction(self.blocks.room_pages)
        self.tenants = Tenants()
        self.pages = Pages(self.blocks, layout.page_tokens, self.lru, self.tenants)
        self.tree = PrefixTree(layout.page_tokens)
        self.sequences: dict[RequestId, PoolSequence] = {}
        self.counters = PoolCounters((layout.page_bytes, layout.size_bytes(packed=True)))
        self.now = clock  # monotonic seconds
        self.host = HostSlots(0)
        self._max_host_pages = max_host_pages
        self.ghosts = Ghosts(limit=capacity_pages)
        self.disk = DiskTier(self.tree, self.host, self.counters, clock)
        parts = self.pages, self.tree, self.lru, self.blocks, self.host, self.ghosts, self.tenants
        self.residency = Residency(*parts, self.counters, self.disk, clock)
        self._publisher = Publisher(self.tree, self.pages, self.blocks, self.residency, self.disk)
        lower = self.disk, self.residency, self.host, self.tree, self.pages, self.blocks
        self._traffic = DiskTraffic(*lower, self.counters)
        self.claimed = Claim(self.pages, self.blocks, clock)
        known = self.pages, self.blocks, self.residency, self.claimed, self.sequences
        self.relocator = Relocator(*known)
        allotted = self.blocks, self.pages, self.residency, self.relocator
        self._allocator = Allocator(*allotted, self.counters, clock)
        upward = self._allocator, self.residency, self.disk, self._traffic, self.pages
        self._bring_up = BringUp(*upward, self.blocks, clock)
        lookups = self.counters, self.ghosts, self.disk, layout.page_tokens
        self._lookups = Lookups(*lookups, clock)
        self.pins = Pins(self.pages, self.tree, self.tenants, self.counters, clock)
        self.pins.capacity_pages = capacity_pages
        self.announced = Announcements(layout.page_tokens)
        shared = self.pages, self.blocks, self.tree, self.announced, self.counters
        self.retention = Retention(layout, *shared, clock, lambda: self.configured_pages)
        workers = self.relocator, self._allocator, self.retention
        self._packer = Packer(*workers, self.pages, self.blocks, self.disk, self.counters)
        givers = self._allocator, self.retention, self.residency, self.pages, self.blocks
        self._admission = Admission(*givers, self.claimed, self.tree, self.counters, clock)
        self._epoch = 0

    @property
    def packing(self) -> PackingSchedule | None:
        return self.retention.packing

    @packing.setter
    def packing(self, packing: PackingSchedule | None) -> None:
        self.retention.packing = packing

    @property
    def mover(self) -> PageMover | None:
        return self.relocator.mover

    @mover.setter
    def mover(self, mover: PageMover) -> None:
        self.relocator.mover = mover

    @property
    def free_pages(self) -> int:
        """Places that hold nothing."""
        return self.capacity_pages - self.blocks.used_pages

    @property
    def capacity_pages(self) -> int:
        """Places within the limit; while a lowered one is exceeded, the pages in use."""
        return max(self.blocks.capacity_pages, self.blocks.used_pages)

    @property
    def host_limit_bytes(self) -> int:
        """Host memory that pages may take; lowering it evicts what exceeds it."""
        return self.host.capacity * self.layout.page_bytes

    @host_limit_bytes.setter
    def host_limit_bytes(self, limit_bytes: int) -> None:
        self._epoch += 1
        self.host.capacity = min(limit_bytes // self.layout.page_bytes, self._max_host_pages)
        self.residency.shrink_host()

    @property
    def occupied_pages(self) -> int:
        """Pages that hold something, reusable or not: what the watermarks compare with."""
        return self.blocks.used_pages

    @property
    def obtainable_pages(self) -> int:
        """Full pages an allocation can get now; see `Allocator.obtainable_pages`."""
        return self._allocator.obtainable_pages()

    def match(self, tokens: "array[int]", namespace: str, longest_tokens: int = 0) -> PrefixMatch:
        """Find what is computed of a sequence, to the token; at most all tokens but the last.

        Pages may be in lower tiers only: `restore` brings them up. Changes nothing: no reference,
        no place in the LRU order, no counter. O(len(tokens)), whatever the pool's size. How long it
        may become tells whether it may outgrow its budget.
        """
        usable, bounded = self.retention.usable_tokens(longest_tokens)
        data = tokens[:usable].tobytes()
        known = data[: (len(tokens) - 1) * tokens.itemsize]
        packed = self.blocks.is_packed if self.blocks.packed_blocks else None
        found = self.tree.match(namespace, known, packed)
        num_pages = len(found.nodes)
        start = num_pages * self.tree.page_bytes
        end = found.nodes[-1] if found.nodes else self.tree.root(namespace)
        awaited = self.announced.follows(end.key, data[start : start + self.tree.page_bytes])
        files = self.disk.find(end.key, known[start:])
        more = len(files) * self.layout.page_tokens or found.tail_tokens
        num_tokens = num_pages * self.layout.page_tokens + more
        rest = found.tail, found.tail_tokens, num_tokens, awaited, self._epoch, files, end, bounded
        return PrefixMatch(found.nodes, *rest)

    def restore(self, match: PrefixMatch, tenant: str = "", ahead: bool = False) -> None:
        """Order copies of what a match has in lower tiers only, if they are not under way.

        Args:
            tenant: Whom pages read from the disk are charged to.
            ahead: Nobody waits for them yet.

        Raises:
            PoolExhausted: pages for them cannot be had now. Nothing has changed.
        """
        self._epoch += 1
        self._bring_up.restore(match, self.tenants.number(tenant), ahead)

    def restored_pages(self, match: PrefixMatch) -> int:
        """Full pages that `restore` takes for what a match has in lower tiers only."""
        return self._bring_up.full_pages_for(match.missing)

    def reserve_pages(self, match: PrefixMatch, num_tokens: int, most_tokens: int) -> int:
        """Full pages that a sequence of `num_tokens` takes after its start until it has the most.

        `match` is what it finds, taken to be back on the device.
        """
        packed = self.residency.count_packed(match.nodes)
        return self.retention.reserve_pages(num_tokens, match, packed, most_tokens)

    def admit(
        self,
        request_id: RequestId,
        tokens: "array[int]",
        namespace: str,
        match: PrefixMatch,
        reserve_pages: int = 0,
        count_lookup: bool = True,
        tenant: str = "",
    ) -> tuple[PoolSequence, int]:
        """Start a sequence: hold what matched and allocate pages for what it computes first.

        A partly matched page is given up when the pool is too tight for it beside its copy.

        Args:
            request_id: Unique among running sequences.
            tokens: All tokens so far; the array stays the caller's, and grows.
            namespace: What may be shared with.
            match: From `match` with the same tokens and namespace, and no change of the pool since.
            reserve_pages: Pages that must stay obtainable after this; not allocated.
            count_lookup: Count hits and misses: once for each request, never when it resumes.
            tenant: Whom new pages are charged to.

        Returns:
            The sequence, and how many of its tokens are cached.

        Raises:
            PoolExhausted: pages for tokens and reserve cannot be had now. Nothing has changed.
        """
        if match.epoch != self._epoch or request_id in self.sequences:
            raise InvariantError(f"stale match or second admission of {request_id}")
        self._epoch += 1
        what = request_id, tokens, namespace, match, reserve_pages, self.tenants.number(tenant)
        sequence, cached_tokens = self._admission.start(*what, alone=not self.sequences)
        keys = self.announced.announce(sequence, self.retention.shared_pages(match.bounded))
        if count_lookup:
            sequence.miss = miss_of(self, tokens, namespace, match, cached_tokens, keys)
            used = match.nodes[: cached_tokens // self.layout.page_tokens]
            more = keys, self.regret_window_seconds
            self._lookups.count_start(sequence, cached_tokens, used, *more)
        self.sequences[request_id] = sequence
        return sequence, cached_tokens

    def grow(self, sequence: PoolSequence, num_tokens: int) -> None:
        """Give a sequence pages for `num_tokens` tokens in all.

        Raises:
            PoolExhausted: they cannot be had now. Nothing has changed.
        """
        wanted = self.layout.pages_for(num_tokens) - sequence.span_pages
        if wanted <= 0:
            return
        if wanted > self.obtainable_pages:
            self.counters.allocations["failed"] += 1
            raise PoolExhausted(f"{wanted} pages wanted, {self.obtainable_pages} to be had")
        self._epoch += 1
        sequence.pages += self._allocator.allocate(wanted, sequence.tenant)

    def copied(self, sequence: PoolSequence) -> None:
        """The sequence's copies on write are done; their sources are let go."""
        if sequence.copies:
            self._epoch += 1
            self._drop([copy.source for copy in sequence.copies[::-1]])
            sequence.copies.clear()

    def publish(self, sequence: PoolSequence, num_computed: int) -> None:
        """Put a sequence's full pages into the tree, once the step that wrote them has completed.

        Where an equal page is there already, the sequence takes that one and lets its own go; its
        index goes to `sequence.rewritten`.

        Args:
            num_computed: Tokens whose KV is written.
        """
        last = min(
            num_computed // self.layout.page_tokens, self.retention.publishable_pages(sequence)
        )
        if sequence.sealed_pages < last:
            self._drop(self._publisher.publish(sequence, last, self.announced))

    def pack(self, sequence: PoolSequence, num_tokens: int) -> int:
        """Pack what is due of a sequence, as far as may be now; see `Packer.pack`."""
        self._epoch += 1
        return self._packer.pack(sequence, num_tokens)

    def release(self, sequence: PoolSequence, num_computed: int, keep: bool = True) -> None:
        """End a running sequence: its pages become cached, stay with others, or are freed.

        Args:
            num_computed: Tokens whose KV is written.
            keep: False: what this sequence wrote and did not publish yet is suspect and is
                quarantined until the next audit.
        """
        self._epoch += 1
        if keep:
            sequence.bounded = False  # what it does not go on with can be shared
            self.publish(sequence, num_computed)
            start = sequence.sealed_pages * self.layout.page_tokens
            if start < num_computed < start + self.layout.page_tokens:
                data = sequence.tokens[start:num_computed].tobytes()
                self._publisher.seal(sequence, sequence.pages[sequence.sealed_pages], data)
        self.announced.withdraw_rest(sequence)
        self.copied(sequence)
        del self.sequences[sequence.request_id]
        held = sequence.pages
        if not keep:
            for page in held[sequence.sealed_pages :]:
                self.pages.quarantine(page)
            held = held[: sequence.sealed_pages]
        self._drop(held[::-1])
        sequence.pages = []

    def reclaim(self, max_pages: int) -> int:
        """One step of background reclaim to the low mark, and of the cleaner above it.

        Returns pages evicted, at once or as soon as their copies have ended.
        """
        occupied, cached = self.occupied_pages, self.pages.cached
        self.watermarks.observe(occupied, self.capacity_pages, self.now())
        excess = self.watermarks.excess_pages(occupied, self.capacity_pages, cached)
        excess -= len(self.residency.leaving)
        evicted = 0
        if excess > 0:
            self._epoch += 1
            evicted = self.residency.reclaim(min(excess, max_pages), "watermark")
        if occupied > self.watermarks.low * self.capacity_pages:
            self.residency.clean(max_pages)
        return evicted

    def make_room(self, num_pages: int) -> None:
        """See to it that so many pages will be free in the next steps, if there is a host tier."""
        self._epoch += 1
        with suppress(PoolExhausted):  # pages could not be moved: tried again in the next step
            self._allocator.make_room(min(num_pages, self.obtainable_pages), [])

    def evict(self, num_pages: int) -> int:
        """Evict on an operator's order; returns how many pages go, now or after their copies."""
        self._epoch += 1
        return self.residency.reclaim(min(num_pages, self.pages.cached), "admin")

    def flush(self) -> int:
        """Forget every cached page and give empty blocks back; returns how many were freed."""
        self._epoch += 1
        parts = self.residency, self.disk, self.tree, self.lru, self.blocks
        dropped = drop_all(*parts)
        self.blocks.decommit_empty()
        return dropped

    def drop_prefix(self, top: Node) -> tuple[int, int]:
        """Forget a prefix and what follows it; returns pages freed, and pages held or pinned."""
        self._epoch += 1
        return drop_prefix(top, self.residency, self.disk, self.tree, self.blocks)

    def relocate(self, moves: Sequence[PageMove]) -> None:
        """Move contents, as `relocator` has planned; if `mover` raises, nothing has changed."""
        self._epoch += 1
        self.relocator.move(moves)

    def set_quotas(self, quota_pages: Mapping[str, int]) -> None:
        """Other quotas, by tenant; what exceeds one goes first at the next eviction."""
        self.tenants.set_quotas(quota_pages)
        owner, lane = self.pages.owner, self.tenants.lane
        self.lru.arrange(self.tenants.lanes, lambda page: lane(owner[page]))

    def advance_pins(self) -> None:
        """Let expired pins go and bring up what others have on the host; called in each step."""
        self._epoch += 1
        self.pins.advance()
        for pin in self.pins.incomplete():
            with suppress(PoolExhausted):  # tried again in the next step
                self.restore(PrefixMatch(pin.nodes, None, 0, 0, False, self._epoch))

    def finish_transfer(self, transfer_id: TransferId, succeeded: bool) -> None:
        """A copier reports the end of a transfer; reports that nobody waits for are counted."""
        self._epoch += 1
        self.residency.finish(transfer_id, succeeded)

    def advance_disk(self, reports: Sequence[DiskReport]) -> None:
        """Settle what has ended on disk and begin what can be written; called in each step."""
        self._epoch += 1
        self._traffic.advance(reports)

    def _drop(self, pages: list[PageId]) -> None:
        self.blocks.put(self.pages.drop(pages, self.now()))
