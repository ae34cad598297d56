"""A pool that holds packed pages: who gets them, when, and what can still be had."""

from array import array

import pytest
from pool_model import FakeBacking, FakeMemory

from memd.engine.limits import longest_request
from memd.errors import PoolExhausted
from memd.pool import describe
from memd.pool.audit import check
from memd.pool.layout import KVLayout
from memd.pool.need import PackedNeed
from memd.pool.packing import PackingSchedule, packing_step_tokens
from memd.pool.pool import Pool
from memd.pool.prefix_tree import Node
from memd.pool.sequence import PoolSequence
from memd.pool.watermarks import Watermarks
from memd.types import RequestId

PAGE_TOKENS = 16
FULL, PACKED = 4, 7  # pages of a block
FIRST, RECENT = 16, 32
STEP = packing_step_tokens(PAGE_TOKENS)
NUM_BLOCKS = 12


class Stand:
    """A pool with packing, and sequences whose content is checked."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, host_pages: int = 0) -> None:
        self.time = 0.0
        layout = KVLayout(1, 1, 1, 1, PAGE_TOKENS, FULL * 2 * PAGE_TOKENS, PAGE_TOKENS + 1)
        assert (layout.pages_per_block, layout.packed_pages_per_block) == (FULL, PACKED)
        self.pool = Pool(
            layout,
            num_blocks * FULL,
            FakeBacking(),
            Watermarks(1.0, 0.99),
            self.clock,
            max_host_pages=host_pages,
        )
        self.pool.host_limit_bytes = host_pages * layout.page_bytes
        self.memory = FakeMemory(layout, num_blocks, self.pool.blocks)
        self.pool.mover = self.memory
        self.pool.packing = PackingSchedule(PAGE_TOKENS, FIRST, RECENT)
        self.computed: dict[PoolSequence, int] = {}
        self.serial = 0
        self.host: dict[int, bytes] = {}

    def clock(self) -> float:
        self.time += 1.0
        return self.time

    def start(self, tokens: list[int], reserve: int = 0) -> PoolSequence:
        """Admit, and compute what pages were given for."""
        self.serial += 1
        data = array("i", tokens)
        match = self.pool.match(data, "")
        sequence, cached = self.pool.admit(
            RequestId(str(self.serial)), data, "", match.on_device(PAGE_TOKENS), reserve
        )
        for copy in sequence.copies:
            for offset, token in enumerate(self.memory.read(copy.source)):
                if offset < copy.num_tokens:
                    assert token is not None
                    self.memory.write(copy.target, offset, token)
        self.computed[sequence] = cached
        self.compute(sequence, min(len(tokens), sequence.span_pages * PAGE_TOKENS))
        return sequence

    def rest(self, sequence: PoolSequence) -> None:
        """Compute the rest of a prompt, which stays full."""
        self.pool.grow(sequence, len(sequence.tokens))
        self.compute(sequence, len(sequence.tokens))

    def compute(self, sequence: PoolSequence, upto: int) -> None:
        self.pool.copied(sequence)
        for position in range(self.computed[sequence], upto):
            page = sequence.pages[position // PAGE_TOKENS]
            self.memory.write(page, position % PAGE_TOKENS, sequence.tokens[position])
        self.computed[sequence] = upto
        self.pool.publish(sequence, upto)
        self.verify(sequence)

    def decode(self, sequence: PoolSequence, tokens: list[int]) -> None:
        """One token at a time, packed as the engine packs."""
        for token in tokens:
            sequence.tokens.append(token)
            self.pool.grow(sequence, len(sequence.tokens))
            self.compute(sequence, len(sequence.tokens))
            if len(sequence.tokens) % STEP == 0:
                self.pool.pack(sequence, len(sequence.tokens))

    def end(self, sequence: PoolSequence) -> None:
        self.pool.release(sequence, self.computed.pop(sequence))

    def verify(self, sequence: PoolSequence) -> None:
        """What is stored at a sequence's pages is its own tokens."""
        stored = [token for page in sequence.pages for token in self.memory.read(page)]
        computed = self.computed[sequence]
        assert stored[:computed] == sequence.tokens.tolist()[:computed]

    def formats(self, sequence: PoolSequence) -> str:
        """A letter for each page of a sequence."""
        return "".join("fp"[self.pool.blocks.is_packed(page)] for page in sequence.pages)

    def copies(self) -> list[bool]:
        """Make all copies between device and host; returns whether they were of packed pages."""
        orders = self.pool.residency.take_orders()
        for order in orders:
            if order.path == "d2h":
                self.host[order.slot] = self.memory.raw(order.page, order.packed)
            else:
                self.memory.put(order.page, order.packed, self.host[order.slot])
            self.pool.finish_transfer(order.id, True)
        return [order.packed for order in orders]

    def sound(self) -> None:
        assert check(self.pool) == []
        for sequence in self.pool.sequences.values():
            self.verify(sequence)


@pytest.fixture
def stand() -> Stand:
    return Stand()


def numbers(count: int, kind: int = 0) -> list[int]:
    return [(index * 7 + kind * 31 + index // 100) % 100 for index in range(count)]


def test_the_middle_of_a_sequence_is_packed_and_reads_the_same(stand: Stand) -> None:
    sequence = stand.start(numbers(10 * PAGE_TOKENS))
    assert stand.pool.pack(sequence, 10 * PAGE_TOKENS) == 5
    assert stand.formats(sequence) == "fpppppffff"
    assert sequence.rewritten == [1, 2, 3, 4, 5]
    assert (stand.pool.blocks.packed_blocks, stand.pool.counters.packed) == (1, 5)
    assert stand.pool.pages.node[sequence.pages[3]] is not None
    stand.sound()
    stand.decode(sequence, numbers(6 * PAGE_TOKENS, 1))
    assert stand.formats(sequence) == "f" + "p" * 13 + "ff"
    stand.sound()


def test_nothing_due_costs_nothing_and_changes_nothing(stand: Stand) -> None:
    sequence = stand.start(numbers(10 * PAGE_TOKENS))
    stand.pool.pack(sequence, 10 * PAGE_TOKENS)
    calls = list(stand.memory.calls)
    assert stand.pool.pack(sequence, 10 * PAGE_TOKENS) == 0
    assert stand.memory.calls == calls
    assert sequence.packing_start == 6


def test_free_active_cached_and_pinned_places_are_the_capacity(stand: Stand) -> None:
    pool = stand.pool
    first = stand.start(numbers(10 * PAGE_TOKENS))
    assert pool.capacity_pages == NUM_BLOCKS * FULL
    pool.pack(first, 10 * PAGE_TOKENS)
    assert pool.capacity_pages == NUM_BLOCKS * FULL + PACKED - FULL
    stand.end(first)
    assert pool.free_pages + pool.pages.cached == pool.capacity_pages
    assert pool.pages.cached_packed == 5
    assert pool.obtainable_pages == NUM_BLOCKS * FULL


def test_a_shared_page_is_packed_when_the_last_that_holds_it_allows(stand: Stand) -> None:
    common = numbers(8 * PAGE_TOKENS)
    short = stand.start([*common, 1])
    long = stand.start(common + numbers(16 * PAGE_TOKENS, 1))
    assert short.pages[:8] == long.pages[:8]
    stand.pool.pack(short, len(short.tokens))  # at 8 pages, its pages up to the sixth are due
    assert stand.formats(short) == stand.formats(long)[:9] == "fpppppfff"
    stand.pool.pack(long, len(long.tokens))
    assert stand.formats(long) == "fpppppff" + "p" * 14 + "ff"
    stand.decode(short, numbers(4 * PAGE_TOKENS - 1, 2))
    assert stand.formats(short)[:8] == stand.formats(long)[:8] == "fppppppp"
    assert short.pages[:8] == long.pages[:8]
    assert {6, 7} <= set(long.rewritten)
    stand.sound()


def test_a_warm_start_finds_packed_pages_and_computes_what_only_they_have_in_part(
    stand: Stand,
) -> None:
    tokens = numbers(10 * PAGE_TOKENS)
    cold = stand.start(tokens)
    stand.pool.pack(cold, len(tokens))
    stand.end(cold)
    within = tokens[: 3 * PAGE_TOKENS + 5]
    match = stand.pool.match(array("i", [*within, 99]), "")
    assert (match.num_tokens, match.tail) == (3 * PAGE_TOKENS, None)
    in_full = tokens[: 7 * PAGE_TOKENS + 5]
    match = stand.pool.match(array("i", [*in_full, 99]), "")
    assert (match.num_tokens, match.tail_tokens) == (7 * PAGE_TOKENS + 5, 5)
    warm = stand.start(tokens)
    assert stand.formats(warm)[:9] == "fpppppfff"
    stand.sound()


def test_pages_that_are_pinned_are_packed_and_stay_pinned(stand: Stand) -> None:
    stand.pool.pins.limit_ratio = 1.0
    sequence = stand.start(numbers(10 * PAGE_TOKENS))
    stand.pool.pins.pin(sequence.node, None, "")
    stand.pool.pack(sequence, 10 * PAGE_TOKENS)
    assert stand.formats(sequence) == "fpppppffff"
    stand.end(sequence)
    assert stand.pool.pages.pinned == 10
    assert stand.pool.obtainable_pages == NUM_BLOCKS * FULL - FULL - 5
    stand.sound()


def test_pages_that_are_copied_or_claimed_are_tried_again(stand: Stand) -> None:
    stand = Stand(host_pages=20)
    sequence = stand.start(numbers(10 * PAGE_TOKENS))
    nodes: list[Node] = []
    for page in sequence.pages:
        node = stand.pool.pages.node[page]
        assert node is not None
        nodes.append(node)
    assert stand.pool.residency.write_back(nodes[2], None)
    stand.pool.claimed.extend(nodes[:5])
    assert stand.pool.pack(sequence, 10 * PAGE_TOKENS) == 1
    assert stand.formats(sequence) == "fffffpffff"
    stand.pool.claimed.release()
    assert stand.pool.pack(sequence, 10 * PAGE_TOKENS) == 3
    assert stand.copies() == [False]
    assert stand.pool.pack(sequence, 10 * PAGE_TOKENS) == 1
    assert stand.formats(sequence) == "fpppppffff"
    stand.sound()


def test_a_mover_that_fails_changes_nothing(stand: Stand) -> None:
    sequence = stand.start(numbers(10 * PAGE_TOKENS))
    before = list(sequence.pages), stand.pool.free_pages
    stand.memory.fail = True
    assert stand.pool.pack(sequence, 10 * PAGE_TOKENS) == 0
    assert (list(sequence.pages), stand.pool.free_pages) == before
    assert (stand.pool.counters.packing_failed, stand.pool.counters.packed) == (5, 0)
    assert sequence.rewritten == []
    stand.sound()
    stand.memory.fail = False
    assert stand.pool.pack(sequence, 10 * PAGE_TOKENS) == 5


def test_no_cached_page_goes_for_a_few_that_are_packed(stand: Stand) -> None:
    stand = Stand(num_blocks=6)
    old = stand.start(numbers(14 * PAGE_TOKENS, 1))
    stand.end(old)
    sequence = stand.start(numbers(8 * PAGE_TOKENS))
    assert stand.pool.blocks.free_full_pages == 2
    assert stand.pool.pack(sequence, 4 * PAGE_TOKENS) == 0  # one page: it would cost two
    assert (stand.pool.counters.packing_no_room, stand.pool.pages.cached) == (1, 14)
    assert stand.pool.pack(sequence, 8 * PAGE_TOKENS) == 5  # these give back more than they cost
    assert stand.pool.pages.cached == 12
    stand.sound()


def fragmented(stand: Stand) -> list[PoolSequence]:
    """Sequences whose packed pages lie with cached ones in every packed block."""
    kept: list[PoolSequence] = []
    for kind in range(4):
        sequence = stand.start(numbers(6 * PAGE_TOKENS, kind) + [kind] * 2 * PAGE_TOKENS)
        stand.pool.pack(sequence, 8 * PAGE_TOKENS)
        assert stand.formats(sequence) == "fpppppff"
        if kind % 2:
            stand.end(sequence)
        else:
            kept.append(sequence)
    return kept


def test_exactly_what_is_promised_can_be_had_out_of_packed_blocks(stand: Stand) -> None:
    kept = fragmented(stand)
    pool = stand.pool
    assert pool.blocks.packed_blocks == 3
    obtainable = pool.obtainable_pages
    # Two sequences keep 10 packed pages, in 2 blocks, and 3 full pages each.
    assert obtainable == (NUM_BLOCKS - 2) * FULL - 2 * 3
    grabbed = stand.start([100] * (obtainable * PAGE_TOKENS))
    stand.rest(grabbed)
    assert len(grabbed.pages) == obtainable
    assert pool.blocks.packed_blocks == 2
    assert pool.obtainable_pages == 0
    assert stand.memory.calls[-1][0] == "move"
    stand.sound()
    for sequence in kept:
        stand.end(sequence)


def test_an_allocation_that_cannot_move_pages_is_refused(stand: Stand) -> None:
    fragmented(stand)
    grabbed = stand.start([100] * (stand.pool.obtainable_pages * PAGE_TOKENS))
    stand.memory.fail = True
    with pytest.raises(PoolExhausted, match="told to fail"):
        stand.rest(grabbed)
    stand.sound()


def test_what_a_start_keeps_is_not_promised_to_it(stand: Stand) -> None:
    tokens = numbers(16 * PAGE_TOKENS)
    first = stand.start(tokens)
    stand.pool.pack(first, len(tokens))
    stand.end(first)
    room = NUM_BLOCKS * FULL - 2 * FULL - 2  # two packed blocks and what is full of the prefix
    more = [100] * ((room - 1) * PAGE_TOKENS)
    warm = stand.start(tokens[: 15 * PAGE_TOKENS] + more)
    assert stand.formats(warm)[:15] == "f" + "p" * 13 + "f"
    with pytest.raises(PoolExhausted):
        stand.pool.grow(warm, len(warm.tokens) + 2 * PAGE_TOKENS)
    stand.sound()


def test_a_packed_page_goes_to_the_host_and_comes_back_packed() -> None:
    stand = Stand(host_pages=40)
    tokens = numbers(10 * PAGE_TOKENS)
    first = stand.start(tokens)
    stand.pool.pack(first, len(tokens))
    stand.end(first)
    assert stand.pool.evict(10) == 10
    assert sorted(stand.copies()) == [False] * 5 + [True] * 5
    assert (stand.pool.pages.cached, stand.pool.blocks.packed_blocks) == (0, 0)
    match = stand.pool.match(array("i", tokens), "")
    assert len(match.missing) == 9
    assert stand.pool.restored_pages(match) == 4 + FULL
    stand.pool.restore(match)
    assert stand.pool.blocks.packed_pages == 5
    stand.copies()
    warm = stand.start(tokens)
    assert stand.formats(warm) == "fpppppffff"
    assert stand.computed[warm] == len(tokens)
    stand.sound()
    sizes = stand.pool.layout.page_bytes, stand.pool.layout.size_bytes(packed=True)
    assert stand.pool.counters.transferred_bytes["d2h"] == 5 * sum(sizes)
    assert stand.pool.counters.transferred_bytes["h2d"] == 4 * sizes[0] + 5 * sizes[1]


def test_a_full_copy_on_the_host_outlives_packing() -> None:
    stand = Stand(host_pages=40)
    tokens = numbers(10 * PAGE_TOKENS)
    first = stand.start(tokens)
    for page in first.pages:
        node = stand.pool.pages.node[page]
        assert node is not None
        stand.pool.residency.write_back(node, None)
    stand.copies()
    assert stand.pool.pack(first, len(tokens)) == 5
    stand.end(first)
    assert stand.pool.evict(10) == 10
    assert stand.copies() == []
    stand.pool.restore(stand.pool.match(array("i", tokens), ""))
    assert stand.copies() == [False] * 9
    warm = stand.start(tokens)
    assert stand.formats(warm) == "f" * 10
    stand.sound()


def test_packed_pages_come_back_in_place_of_cached_full_ones() -> None:
    stand = Stand(num_blocks=5, host_pages=40)
    tokens = numbers(10 * PAGE_TOKENS)
    first = stand.start(tokens)
    stand.pool.pack(first, len(tokens))
    stand.end(first)
    stand.pool.evict(10)
    stand.copies()
    other = stand.start(numbers(20 * PAGE_TOKENS, 3))
    stand.rest(other)
    stand.end(other)
    assert stand.pool.blocks.free_full_pages == 0
    for _ in range(10):
        match = stand.pool.match(array("i", tokens), "")
        if not match.missing:
            break
        stand.pool.restore(match)
        stand.copies()
    assert not match.missing
    stand.pool.make_room(1)
    stand.copies()
    assert stand.formats(stand.start(tokens))[:9] == "fpppppfff"
    stand.sound()


def test_c055_after_defragmentation_every_live_page_has_one_place_and_its_content(
    stand: Stand,
) -> None:
    kept = fragmented(stand)
    pool = stand.pool
    pool.evict(pool.pages.cached)
    formats = [stand.formats(sequence) for sequence in kept]
    live = sum(len(sequence.pages) for sequence in kept)
    surplus = pool.blocks.surplus_blocks
    assert (pool.blocks.surplus_packed_blocks, surplus > 0) == (1, True)
    while moves := pool.relocator.plan(3):
        assert len({move.packed for move in moves}) == 1
        pool.relocate(moves)
        stand.sound()
    assert pool.blocks.surplus_blocks == 0
    assert [stand.formats(sequence) for sequence in kept] == formats
    places = set()
    for sequence in kept:
        for page in sequence.pages:
            packed = pool.blocks.is_packed(page)
            start = pool.layout.page_offset_bytes(page, packed)
            places |= set(range(start, start + pool.layout.size_bytes(packed)))
    packed_pages = sum(map(len, formats)) - "".join(formats).count("f")
    sizes = pool.layout.page_bytes, pool.layout.size_bytes(packed=True)
    assert len(places) == (live - packed_pages) * sizes[0] + packed_pages * sizes[1]


def test_the_map_tells_the_format_of_each_block(stand: Stand) -> None:
    sequence = stand.start(numbers(10 * PAGE_TOKENS))
    stand.pool.pack(sequence, 10 * PAGE_TOKENS)
    columns = describe.blocks(stand.pool, 0, 100)["columns"]
    packed = columns["packed"].index(True)
    assert columns["packed"].count(True) == 1
    assert (columns["active"][packed], columns["free"][packed]) == (5, PACKED - 5)
    assert sum(columns["active"]) == 10


def test_a_pool_serves_a_longer_sequence_when_it_packs() -> None:
    stand = Stand(num_blocks=64)
    pool = stand.pool
    cached = stand.start(numbers(32 * PAGE_TOKENS, 5))
    stand.end(cached)
    in_full = pool.configured_pages * PAGE_TOKENS
    longest = longest_request(100_000, pool)
    assert longest > 1.2 * in_full
    assert pool.retention.peak_pages(longest) <= pool.configured_pages
    assert pool.retention.peak_pages(longest + PAGE_TOKENS * PACKED) > pool.configured_pages
    prompt = numbers(longest - 200)
    reserve = pool.reserve_pages(pool.match(array("i", prompt), ""), len(prompt), longest)
    sequence = stand.start(prompt, reserve)
    while stand.computed[sequence] < len(prompt):
        computed = stand.computed[sequence]
        pool.pack(sequence, computed)
        upto = min(len(prompt), computed + pool.retention.chunk_tokens(computed))
        pool.grow(sequence, upto)
        stand.compute(sequence, upto)
    pool.pack(sequence, len(prompt))
    stand.decode(sequence, numbers(200, 2))
    assert len(sequence.tokens) == longest
    stand.sound()


@pytest.mark.parametrize("packed", [5, 7, 16])
def test_the_need_of_a_sequence_never_falls_as_it_grows(packed: int) -> None:
    layout = KVLayout(1, 1, 1, 1, PAGE_TOKENS, 128, 128 // packed)
    need = PackedNeed(layout, PackingSchedule(PAGE_TOKENS, FIRST, RECENT), 4 * STEP)
    peaks = [need.peak_pages(length) for length in range(3000)]
    assert peaks == sorted(peaks)
    assert all(
        peak <= layout.pages_for(length) + layout.pages_per_block
        for length, peak in enumerate(peaks)
    )
    assert need.blocks(2999) == -(-peaks[-1] // layout.pages_per_block)


def test_without_packing_a_sequence_needs_what_it_always_did() -> None:
    stand = Stand()
    stand.pool.packing = None
    assert stand.pool.retention.peak_pages(1000) == stand.pool.layout.pages_for(1000)
    assert longest_request(100_000, stand.pool) == NUM_BLOCKS * FULL * PAGE_TOKENS
    sequence = stand.start(numbers(10 * PAGE_TOKENS))
    assert stand.pool.pack(sequence, 10 * PAGE_TOKENS) == 0


def test_a_window_lets_packed_pages_go_and_keeps_its_own_full(stand: Stand) -> None:
    pool = stand.pool
    pool.retention.window, pool.retention.sinks = 4 * PAGE_TOKENS, 2 * PAGE_TOKENS
    sequence = stand.start(numbers(8 * PAGE_TOKENS))
    stand.rest(sequence)
    assert pool.pack(sequence, 8 * PAGE_TOKENS) == 5
    assert stand.formats(sequence) == "fpppppff"
    sequence.tokens.extend(numbers(4 * PAGE_TOKENS, 1))
    pool.grow(sequence, len(sequence.tokens))
    stand.compute(sequence, len(sequence.tokens))
    pool.retention.let_go(sequence, len(sequence.tokens), len(sequence.tokens))
    assert sequence.dropped_pages == 6
    assert stand.formats(sequence) == "fpffff"
    assert pool.pack(sequence, len(sequence.tokens)) == 0
    assert check(pool) == []
    assert pool.retention.outstanding_pages(sequence, 40 * PAGE_TOKENS) > 0


def test_packed_pages_that_take_too_much_room_are_not_used_by_who_runs_alone() -> None:
    stand = Stand(num_blocks=4)
    tokens = numbers(5 * PAGE_TOKENS)
    first = stand.start(tokens)
    stand.pool.pack(first, 4 * PAGE_TOKENS)
    assert stand.formats(first) == "fpfff"
    stand.end(first)
    pool = stand.pool
    longer = tokens[: 2 * PAGE_TOKENS] + numbers(14 * PAGE_TOKENS, 1)
    assert pool.layout.pages_for(len(longer)) == pool.configured_pages
    alone = stand.start(longer)
    assert stand.formats(alone) == "f" * 16
    assert alone.miss is not None
    assert (alone.miss.reason, alone.miss.first_token) == ("unusable", 0)
    stand.sound()
