"""The pool against a plain model of it, which writes tokens into fake pages."""

from array import array
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import note
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from memd.errors import OutOfDeviceMemory, PoolExhausted
from memd.pool.audit import audit, check
from memd.pool.layout import KVLayout
from memd.pool.pages import PageState
from memd.pool.pool import Pool
from memd.pool.sequence import PoolSequence
from memd.pool.watermarks import Watermarks
from memd.types import BlockId, PageId, RequestId

PAGE_TOKENS = 4
PAGE_BYTES = PAGE_TOKENS * 2
PAGES_PER_BLOCK = 3

token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=26)
namespaces = st.sampled_from(["", "salt"])


class FakeBacking:
    """Block memory that can be told to refuse, and that checks who commits what."""

    def __init__(self) -> None:
        self.committed: set[BlockId] = set()
        self.refuse = False

    def commit(self, block: BlockId) -> None:
        assert block not in self.committed
        if self.refuse:
            raise OutOfDeviceMemory("told to refuse")
        self.committed.add(block)

    def decommit(self, block: BlockId) -> None:
        self.committed.remove(block)


@dataclass
class Running:
    """A sequence as the engine would drive it."""

    sequence: PoolSequence
    namespace: str
    num_computed: int


@dataclass
class Published:
    """A page that was published, by the tokens from the root to its last one."""

    namespace: str
    tokens: list[int]
    page: PageId
    opened_at: float = field(default=0.0)


class PoolMachine(RuleBasedStateMachine):
    running = Bundle("running")

    @initialize(
        capacity=st.integers(1, 14),
        marks=st.sampled_from([(0.9, 0.5), (0.6, 0.3), (1.0, 0.99)]),
    )
    def start(self, capacity: int, marks: tuple[float, float]) -> None:
        self.time = 0.0
        self.backing = FakeBacking()
        layout = KVLayout(1, 1, 1, 1, PAGE_TOKENS, PAGES_PER_BLOCK * PAGE_BYTES)
        assert layout.page_bytes == PAGE_BYTES
        self.pool = Pool(layout, capacity, self.backing, Watermarks(*marks), self.clock)
        self.memory: list[list[int | None]] = [[None] * PAGE_TOKENS for _ in range(capacity)]
        self.published: list[Published] = []
        self.serial = 0
        self.hits = self.queries = 0

    def clock(self) -> float:
        self.time += 1.0  # every reading differs, so an opening time names one life of a page
        return self.time

    def live(self, entry: Published) -> bool:
        pages = self.pool.pages
        return (
            pages.state[entry.page] == PageState.SEALED
            and pages.opened_at[entry.page] == entry.opened_at
        )

    def expected_match(self, tokens: list[int], namespace: str) -> int:
        wanted = tokens[:-1]
        best = 0
        for entry in self.published:
            if entry.namespace == namespace and self.live(entry):
                common = 0
                for ours, theirs in zip(wanted, entry.tokens, strict=False):
                    if ours != theirs:
                        break
                    common += 1
                best = max(best, common)
        return best

    def write(self, run: Running, upto: int) -> None:
        """Play the kernel: write the tokens' KV and check that what lies before them is theirs."""
        sequence = run.sequence
        for position in range(upto):
            page = sequence.pages[position // PAGE_TOKENS]
            offset = position % PAGE_TOKENS
            if position >= run.num_computed:
                assert self.pool.pages.state[page] == PageState.WRITING
                self.memory[page][offset] = sequence.tokens[position]
            assert self.memory[page][offset] == sequence.tokens[position]
        run.num_computed = upto

    def remember(self, run: Running, upto: int) -> None:
        """Note what publishing up to a token puts in the tree."""
        tokens = run.sequence.tokens.tolist()[:upto]
        for index, page in enumerate(run.sequence.pages):
            end = min((index + 1) * PAGE_TOKENS, upto)
            if end > index * PAGE_TOKENS and self.pool.pages.state[page] == PageState.SEALED:
                opened_at = self.pool.pages.opened_at[page]
                self.published.append(Published(run.namespace, tokens[:end], page, opened_at))

    @rule(target=running, tokens=token_lists, namespace=namespaces, reserve=st.integers(0, 2))
    def admit(self, tokens: list[int], namespace: str, reserve: int) -> object:
        pool = self.pool
        data = array("i", tokens)
        match = pool.match(data, namespace)
        assert match.num_tokens == self.expected_match(tokens, namespace)
        before = (pool.free_pages, pool.pages.active, pool.lru.in_order(), pool.pages.refs.copy())
        self.serial += 1
        request_id = RequestId(str(self.serial))
        try:
            sequence, cached = pool.admit(request_id, data, namespace, match, reserve)
        except PoolExhausted:
            if not self.backing.refuse:
                after = (pool.free_pages, pool.pages.active, pool.lru.in_order(), pool.pages.refs)
                assert after == before
                alone = not pool.sequences
                fits = pool.layout.pages_for(len(tokens)) + reserve <= pool.capacity_pages
                assert not (alone and fits and not pool.pages.quarantined)
            return multiple()
        assert cached in (match.num_tokens, match.num_tokens - match.tail_tokens)
        self.queries += len(tokens)
        self.hits += cached
        if sequence.copy is not None:
            copy = sequence.copy
            source = self.memory[copy.source][: copy.num_tokens]
            assert None not in source
            self.memory[copy.target][: copy.num_tokens] = source
        note(f"{request_id}: {tokens} cached {cached} pages {sequence.pages}")
        return Running(sequence, namespace, cached)

    @rule(run=running, more=st.integers(0, 9))
    def compute(self, run: Running, more: int) -> None:
        """A step: compute some tokens of the prompt, then publish."""
        if run.sequence.request_id not in self.pool.sequences:
            return
        self.pool.copied(run.sequence)
        self.write(run, min(len(run.sequence.tokens), run.num_computed + more))
        self.pool.publish(run.sequence, run.num_computed)
        self.write(run, run.num_computed)
        self.remember(run, run.num_computed // PAGE_TOKENS * PAGE_TOKENS)

    @rule(run=running, token=st.integers(0, 1))
    def decode(self, run: Running, token: int) -> None:
        sequence = run.sequence
        computed_all = run.num_computed == len(sequence.tokens)
        if sequence.request_id not in self.pool.sequences or not computed_all:
            return
        self.pool.copied(sequence)
        before = (list(sequence.pages), self.pool.free_pages, self.pool.lru.in_order())
        sequence.tokens.append(token)
        try:
            self.pool.grow(sequence, len(sequence.tokens))
        except PoolExhausted:
            sequence.tokens.pop()
            if not self.backing.refuse:
                after = (list(sequence.pages), self.pool.free_pages, self.pool.lru.in_order())
                assert after == before
            return
        self.write(run, len(sequence.tokens))

    @rule(run=consumes(running))
    def finish(self, run: Running) -> None:
        if run.sequence.request_id not in self.pool.sequences:
            return
        pages = list(run.sequence.pages)
        self.pool.release(run.sequence, run.num_computed)
        run.sequence.pages = pages
        self.remember(run, run.num_computed)
        run.sequence.pages = []

    @rule(run=consumes(running))
    def fail(self, run: Running) -> None:
        if run.sequence.request_id in self.pool.sequences:
            self.pool.release(run.sequence, run.num_computed, keep=False)

    @rule(pages=st.integers(1, 5))
    def reclaim(self, pages: int) -> None:
        before, cached = self.pool.occupied_pages, self.pool.pages.cached
        freed = self.pool.reclaim(pages)
        assert freed <= min(pages, cached)
        assert self.pool.occupied_pages == before - freed
        if freed:
            assert before > int(self.pool.watermarks.low * self.pool.capacity_pages)

    @rule(pages=st.integers(0, 5))
    def evict(self, pages: int) -> None:
        self.pool.evict(pages)

    @rule()
    def flush(self) -> None:
        self.pool.flush()
        assert self.pool.pages.cached == 0
        assert len(self.backing.committed) == self.pool.blocks.committed_blocks

    @rule(refuse=st.booleans())
    def device_memory(self, refuse: bool) -> None:
        self.backing.refuse = refuse

    @rule(marks=st.sampled_from([(0.5, 0.2), (0.9, 0.7)]))
    def tune(self, marks: tuple[float, float]) -> None:
        self.pool.watermarks.high, self.pool.watermarks.low = marks

    @rule(tokens=token_lists, namespace=namespaces)
    def probe(self, tokens: list[int], namespace: str) -> None:
        before = (self.pool.lru.in_order(), self.pool.pages.refs.copy())
        match = self.pool.match(array("i", tokens), namespace)
        assert match.num_tokens == self.expected_match(tokens, namespace)
        assert (self.pool.lru.in_order(), self.pool.pages.refs) == before

    @rule()
    def audit(self) -> None:
        report = audit(self.pool)
        assert report.problems == []
        assert report.leaked_pages == 0
        assert self.pool.pages.quarantined == 0

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "pool"):
            assert check(self.pool) == []
            counters = self.pool.counters
            assert counters.query_tokens == self.queries
            assert counters.hit_tokens == self.hits
            assert self.hits + sum(counters.miss_tokens.values()) == self.queries
            self.published = [entry for entry in self.published if self.live(entry)]

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for sequence in list(self.pool.sequences.values()):
            self.pool.release(sequence, 0)
        assert self.pool.pages.active == 0
        assert self.pool._announced == {}
        audit(self.pool)
        self.pool.flush()
        assert self.pool.free_pages == self.pool.capacity_pages
        assert self.backing.committed == set()
        assert self.pool.tree.namespaces() == []
        assert self.pool.tree.num_nodes == 0


TestPoolMachine = PoolMachine.TestCase
