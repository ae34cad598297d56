"""The pool: who holds which page. The scheduler's only door to KV memory.

Pure bookkeeping in plain Python: no torch, no threads, no clock but the one passed in. The engine
thread is its only user. Each operation of the door changes everything it says or nothing.
"""

from array import array
from collections.abc import Callable

from memd.errors import InvariantError, OutOfDeviceMemory, PoolExhausted
from memd.pool.blocks import Blocks
from memd.pool.counters import PoolCounters
from memd.pool.ghosts import Ghosts
from memd.pool.layout import KVLayout
from memd.pool.lru import LruEviction
from memd.pool.pages import Pages
from memd.pool.prefix_tree import PrefixTree
from memd.pool.sequence import PageCopy, PoolSequence, PrefixMatch
from memd.pool.watermarks import Watermarks
from memd.types import BlockBacking, EvictionReason, PageId, RequestId


class Pool:
    """Pages of one layout, shared by prefix, evicted by LRU between two watermarks.

    Args:
        layout: Byte arithmetic of pages and blocks.
        capacity_pages: Most pages the pool may hold.
        backing: Memory behind blocks.
        watermarks: The marks in force.
        clock: Monotonic seconds.
        regret_window_seconds: How long after an eviction asking again counts as regret.

    Invariants:
        free + active + cached + quarantined == capacity, in pages, between any two calls.
        A page's references are the sequences that list it, plus copies that read it.
        If a page is held, so are the pages before it in the tree; so every cached page can be
        evicted.
    """

    def __init__(
        self,
        layout: KVLayout,
        capacity_pages: int,
        backing: BlockBacking,
        watermarks: Watermarks,
        clock: Callable[[], float],
        regret_window_seconds: float = 60.0,
    ) -> None:
        self.layout = layout
        self.capacity_pages = capacity_pages
        self.watermarks = watermarks
        self.regret_window_seconds = regret_window_seconds
        self.blocks = Blocks(capacity_pages, layout.pages_per_block, backing)
        self.lru = LruEviction(capacity_pages)
        self.pages = Pages(capacity_pages, layout.page_tokens, self.lru)
        self.tree = PrefixTree(layout.page_tokens)
        self.sequences: dict[RequestId, PoolSequence] = {}
        self.counters = PoolCounters()
        self._clock = clock
        self._ghosts = Ghosts(limit=capacity_pages)
        self._announced: dict[int, int] = {}  # content key -> sequences about to write such a page
        self._epoch = 0

    @property
    def free_pages(self) -> int:
        return self.blocks.free_pages

    @property
    def occupied_pages(self) -> int:
        """Pages that hold something, reusable or not: what the watermarks compare with."""
        return self.capacity_pages - self.blocks.free_pages

    @property
    def obtainable_pages(self) -> int:
        """Pages an allocation can get now: free ones and cached ones."""
        return self.blocks.free_pages + self.pages.cached

    def match(self, tokens: "array[int]", namespace: str) -> PrefixMatch:
        """Find what is computed of a sequence, to the token; at most all tokens but the last.

        Changes nothing: no reference, no place in the LRU order, no counter.

        Cost:
            O(len(tokens)), whatever the pool's size.
        """
        data = tokens.tobytes()
        found = self.tree.match(namespace, data[: -tokens.itemsize])
        num_pages = len(found.nodes)
        num_tokens = num_pages * self.layout.page_tokens + found.tail_tokens
        start = num_pages * self.tree.page_bytes
        next_page = data[start : start + self.tree.page_bytes]
        parent_key = found.nodes[-1].key if found.nodes else hash(namespace)
        awaited = bool(self._announced) and hash((parent_key, next_page)) in self._announced
        return PrefixMatch(
            found.nodes, found.tail, found.tail_tokens, num_tokens, awaited, self._epoch
        )

    def no_match(self) -> PrefixMatch:
        """A match of nothing, for a sequence that must compute all its tokens itself."""
        return PrefixMatch([], None, 0, 0, awaited=False, epoch=self._epoch)

    def admit(
        self,
        request_id: RequestId,
        tokens: "array[int]",
        namespace: str,
        match: PrefixMatch,
        reserve_pages: int = 0,
        count_lookup: bool = True,
    ) -> tuple[PoolSequence, int]:
        """Start a sequence: hold what matched and allocate pages for the rest of its tokens.

        When the pool is too tight to keep a partly matched page beside its copy, the part is given
        up.

        Args:
            request_id: Unique among running sequences.
            tokens: All tokens so far; the array stays the caller's, and grows.
            namespace: What may be shared with.
            match: From `match` with the same tokens and namespace, and no change of the pool since.
            reserve_pages: Pages that must stay obtainable after this; not allocated.
            count_lookup: Count hits and misses: once for each request, never when it resumes.

        Returns:
            The sequence and how many of its tokens are cached.

        Raises:
            PoolExhausted: pages for tokens and reserve cannot be had now. Nothing has changed.

        Cost:
            O(pages of the sequence), whatever the pool's size.
        """
        if match.epoch != self._epoch or request_id in self.sequences:
            raise InvariantError(f"stale match or second admission of {request_id}")
        held = [node.page for node in match.nodes if node.page is not None]
        refs = self.pages.refs
        wanted = self.layout.pages_for(len(tokens)) - len(held)
        obtainable = self.obtainable_pages - sum(1 for page in held if not refs[page])
        tail, cached_tokens = match.tail, match.num_tokens
        if tail is not None and not refs[tail]:
            if wanted + reserve_pages <= obtainable - 1:
                obtainable -= 1
            else:
                tail, cached_tokens = None, cached_tokens - match.tail_tokens
        if wanted + reserve_pages > obtainable:
            self.counters.allocations["failed"] += 1
            raise PoolExhausted(
                f"{wanted} pages and {reserve_pages} in reserve, {obtainable} to be had"
            )
        if tail is not None:
            held.append(tail)
        self._epoch += 1
        self.pages.hold(held)
        try:
            new_pages = self._allocate(wanted)
        except PoolExhausted:
            self._drop(held[::-1])
            raise
        copy = None
        if tail is not None:
            held.pop()
            copy = PageCopy(tail, new_pages[0], match.tail_tokens)
            self.counters.copies += 1
        node = match.nodes[-1] if match.nodes else self.tree.root(namespace)
        sequence = PoolSequence(
            request_id, namespace, tokens, held + new_pages, node, len(held), len(held), copy
        )
        self._announce(sequence, cached_tokens, count_lookup)
        self.sequences[request_id] = sequence
        return sequence, cached_tokens

    def grow(self, sequence: PoolSequence, num_tokens: int) -> None:
        """Give a sequence pages for `num_tokens` tokens in all.

        Raises:
            PoolExhausted: they cannot be had now. Nothing has changed.
        """
        wanted = self.layout.pages_for(num_tokens) - len(sequence.pages)
        if wanted <= 0:
            return
        if wanted > self.obtainable_pages:
            self.counters.allocations["failed"] += 1
            raise PoolExhausted(f"{wanted} pages wanted, {self.obtainable_pages} to be had")
        self._epoch += 1
        sequence.pages += self._allocate(wanted)

    def copied(self, sequence: PoolSequence) -> None:
        """The sequence's copy on write is done; its source is let go."""
        if sequence.copy is not None:
            source, sequence.copy = sequence.copy.source, None
            self._epoch += 1
            self._drop([source])

    def publish(self, sequence: PoolSequence, num_computed: int) -> list[tuple[int, PageId]]:
        """Put a sequence's full pages into the tree, once the step that wrote them has completed.

        Where an equal page is there already, the sequence takes that one and lets its own go.

        Args:
            sequence: A running sequence.
            num_computed: Tokens whose KV is written.

        Returns:
            (index, page) for each entry of the sequence's page table that changed.
        """
        changed: list[tuple[int, PageId]] = []
        first = sequence.sealed_pages
        last = num_computed // self.layout.page_tokens
        if first >= last:
            return changed
        size = self.tree.page_bytes
        page_tokens = self.layout.page_tokens
        data = sequence.tokens[first * page_tokens : last * page_tokens].tobytes()
        for index in range(first, last):
            start = (index - first) * size
            own = sequence.pages[index]
            canonical = self._seal(sequence, own, data[start : start + size])
            if canonical != own:
                sequence.pages[index] = canonical
                changed.append((index, canonical))
                self._drop([own])
            if index < sequence.announced_pages:
                self._withdraw(sequence.node.key)
        sequence.sealed_pages = last
        return changed

    def release(self, sequence: PoolSequence, num_computed: int, keep: bool = True) -> None:
        """End a running sequence: its pages become cached, stay with others, or are freed.

        Args:
            sequence: A running sequence.
            num_computed: Tokens whose KV is written.
            keep: False: what this sequence wrote and did not publish yet is suspect and is
                quarantined until the next audit.
        """
        self._epoch += 1
        if keep:
            self.publish(sequence, num_computed)
            start = sequence.sealed_pages * self.layout.page_tokens
            if start < num_computed:
                data = sequence.tokens[start:num_computed].tobytes()
                self._seal(sequence, sequence.pages[sequence.sealed_pages], data)
        self._withdraw_rest(sequence)
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
        """Background reclaim of one step: evict towards the low mark, at most `max_pages`."""
        self.watermarks.observe(self.occupied_pages, self.capacity_pages, self._clock())
        excess = self.watermarks.excess_pages(
            self.occupied_pages, self.capacity_pages, self.pages.cached
        )
        return self._evict(min(excess, max_pages), "watermark") if excess else 0

    def evict(self, num_pages: int) -> int:
        """Evict on an operator's order; returns how many pages were there to evict."""
        return self._evict(min(num_pages, self.pages.cached), "admin")

    def flush(self) -> int:
        """Evict every cached page and give empty blocks back; returns how many pages."""
        evicted = self.evict(self.pages.cached)
        self.blocks.decommit_empty()
        return evicted

    def _seal(self, sequence: PoolSequence, page: PageId, data: bytes) -> PageId:
        """Offer a written page to the tree; returns the page that now stands for its tokens."""
        self._epoch += 1
        node, superseded = self.tree.insert(sequence.node, data, page)
        if superseded is not None and self.pages.detach(superseded):
            self.blocks.put([superseded])
        if node is None or node.page is None:
            return page
        full = len(data) == self.tree.page_bytes
        if node.page == page:
            self.pages.seal(page, node)
        elif full:
            self.pages.hold([node.page])
        if full:
            sequence.node = node
        return node.page

    def _allocate(self, count: int) -> list[PageId]:
        """Free pages, evicting for what is missing. The caller has checked that they can be had."""
        if not count:
            return []
        started_at = self._clock()
        missing = max(0, count - self.free_pages)
        if missing:
            self._evict(missing, "allocation")
        try:
            pages = self.blocks.take(count)
        except OutOfDeviceMemory as error:
            # Cached pages lie in committed blocks: with enough of them no new block is needed.
            if self.pages.cached < count:
                self.counters.allocations["failed"] += 1
                raise PoolExhausted(f"{count} pages wanted: {error}") from error
            self._evict(count, "allocation")
            missing = count
            pages = self.blocks.take(count)
        now = self._clock()
        self.pages.open(pages, now)
        self.counters.allocations["evicted"] += missing
        self.counters.allocations["free"] += count - missing
        self.counters.allocation_seconds.observe(now - started_at)
        return pages

    def _evict(self, count: int, reason: EvictionReason) -> int:
        started_at = self._clock()
        counters = self.counters
        freed: list[PageId] = []
        idle: list[float] = []
        for _ in range(count):
            page, node, last_used_at = self.pages.evict()
            self.tree.remove(node)
            self._ghosts.add(node.key, started_at)
            idle.append(started_at - last_used_at)
            freed.append(page)
        self.blocks.put(freed)
        self._epoch += 1
        opened_at = self.pages.opened_at
        counters.lifetime_seconds.observe(*[started_at - opened_at[page] for page in freed])
        counters.idle_seconds.observe(*idle)
        counters.evicted[reason] += count
        counters.eviction_passes += 1
        counters.eviction_pass_seconds.observe(self._clock() - started_at)
        return count

    def now(self) -> float:
        """The pool's clock, monotonic seconds."""
        return self._clock()

    def _drop(self, pages: list[PageId]) -> None:
        self.blocks.put(self.pages.drop(pages, self._clock()))

    def _announce(self, sequence: PoolSequence, cached_tokens: int, count_lookup: bool) -> None:
        """Tell later lookups which full pages are coming; count those that were evicted lately."""
        now = self._clock()
        size = self.tree.page_bytes
        data = sequence.tokens.tobytes()
        key = sequence.node.key
        regretted = 0
        while (start := sequence.announced_pages * size) + size <= len(data):
            key = hash((key, data[start : start + size]))
            self._announced[key] = self._announced.get(key, 0) + 1
            sequence.announced_pages += 1
            age = self._ghosts.recall(key, now)
            if age is not None and age <= self.regret_window_seconds:
                regretted += 1
                self.counters.evict_to_reuse_seconds.observe(age)
        self.counters.regretted += regretted
        if count_lookup:
            self._count_lookup(len(sequence.tokens), cached_tokens, regretted)

    def _count_lookup(self, num_tokens: int, cached_tokens: int, regretted_pages: int) -> None:
        counters = self.counters
        counters.query_tokens += num_tokens
        counters.hit_tokens += cached_tokens
        missed = num_tokens - cached_tokens - 1  # the last token is always computed
        evicted = min(missed, regretted_pages * self.layout.page_tokens)
        counters.miss_tokens["final"] += 1
        counters.miss_tokens["evicted"] += evicted
        counters.miss_tokens["cold"] += missed - evicted

    def _withdraw(self, key: int) -> None:
        count = self._announced.pop(key, 0)
        if count > 1:
            self._announced[key] = count - 1

    def _withdraw_rest(self, sequence: PoolSequence) -> None:
        """Withdraw what the sequence announced and never published."""
        size = self.tree.page_bytes
        data = sequence.tokens.tobytes()
        key = sequence.node.key
        for index in range(sequence.sealed_pages, sequence.announced_pages):
            key = hash((key, data[index * size : (index + 1) * size]))
            self._withdraw(key)
        sequence.announced_pages = sequence.sealed_pages
