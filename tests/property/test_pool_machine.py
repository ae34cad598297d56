"""The pool against a plain model of it, which writes tokens into fake pages."""

import contextlib
from array import array
from typing import Any

import hypothesis.strategies as st
import pytest
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
from pool_model import EveryPage, FakeBacking, FakeMemory, Published, Running

from memd.errors import OutOfDeviceMemory, PoolExhausted
from memd.pool.audit import audit, check
from memd.pool.layout import KVLayout
from memd.pool.limit import PoolLimit
from memd.pool.moves import Transfer
from memd.pool.pages import PageState
from memd.pool.pins import PinRefused
from memd.pool.pool import Pool
from memd.pool.sequence import PoolSequence
from memd.pool.watermarks import Watermarks
from memd.types import RequestId

PAGE_TOKENS = 4
PAGE_BYTES = PAGE_TOKENS * 2
PAGES_PER_BLOCK = 3
MOST_PAGES = 24
MOST_BLOCKS = MOST_PAGES // PAGES_PER_BLOCK
BLOCK_BYTES = 30  # 3 full pages of 8 bytes; 4 packed ones of 7, or 6 of 5

token_lists = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=26),
    st.builds(  # long ones that begin alike
        lambda length, tail: [0, 1, 1] * length + tail,
        st.integers(2, 7),
        st.lists(st.integers(0, 1), min_size=1, max_size=5),
    ),
)
namespaces = st.sampled_from(["", "salt"])
TENANT_OF = {"": "ann", "salt": "bob"}  # the salt of a namespace follows the tenant


class PoolMachine(RuleBasedStateMachine):
    running = Bundle("running")

    @initialize(
        capacity=st.integers(1, 14),
        marks=st.sampled_from([(0.9, 0.5), (0.6, 0.3), (1.0, 0.99)]),
        host=st.sampled_from([0, 1, 3, 30]),
        pin_limit=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def start(self, capacity: int, marks: tuple[float, float], host: int, pin_limit: float) -> None:
        self.begin(capacity, marks, host, pin_limit)

    def begin(
        self,
        capacity: int,
        marks: tuple[float, float],
        host: int,
        pin_limit: float,
        packed_bytes: int | None = None,
        first: int = 0,
        recent: int = 0,
    ) -> None:
        self.time = 0.0
        self.backing = FakeBacking()
        block_bytes = PAGES_PER_BLOCK * PAGE_BYTES if packed_bytes is None else BLOCK_BYTES
        layout = KVLayout(1, 1, 1, 1, PAGE_TOKENS, block_bytes, packed_bytes)
        assert (layout.page_bytes, layout.pages_per_block) == (PAGE_BYTES, PAGES_PER_BLOCK)
        self.pool = Pool(
            layout, capacity, self.backing, Watermarks(*marks), self.clock, max_host_pages=30
        )
        self.pool.host_limit_bytes = host * PAGE_BYTES
        self.pool.pins.limit_ratio = pin_limit
        self.memory = FakeMemory(layout, MOST_BLOCKS, self.pool.blocks)
        if packed_bytes is not None:
            self.pool.mover = self.memory
            self.pool.packing = EveryPage(PAGE_TOKENS, first, recent)
        self.host_memory: dict[int, tuple[bool, bytes]] = {}
        self.copying: list[Transfer] = []
        self.limit = PoolLimit(self.pool, MOST_PAGES)
        self.published: list[Published] = []
        self.serial = 0
        self.hits = self.queries = 0

    def clock(self) -> float:
        self.time += 1.0  # every reading differs, so an opening time names one life of a page
        return self.time

    def on_device(self, entry: Published) -> bool:
        page = entry.node.page
        return page is not None and self.pool.pages.node[page] is entry.node

    def live(self, entry: Published) -> bool:
        slot = entry.node.host
        on_host = slot is not None and self.pool.host.holders().get(slot) is entry.node
        return self.on_device(entry) or on_host

    def longest(self, tokens: list[int]) -> int:
        """The length that a prompt's sequence may reach; 0: it makes no difference."""
        return 0

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
                page = entry.node.page  # parts are copied from full pages on the device only
                source = self.on_device(entry) and not self.pool.blocks.is_packed(page)
                before_it = (len(entry.tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS
                if not source or common <= before_it:
                    common -= common % PAGE_TOKENS
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
                self.memory.write(page, offset, sequence.tokens[position])
            assert self.memory.read(page)[offset] == sequence.tokens[position]
        run.num_computed = upto

    def remember(self, run: Running, upto: int) -> None:
        """Note what publishing up to a token puts in the tree."""
        tokens = run.sequence.tokens.tolist()[:upto]
        for index, page in enumerate(run.sequence.pages):
            end = min((index + 1) * PAGE_TOKENS, upto)
            node = self.pool.pages.node[page]
            if end > index * PAGE_TOKENS and node is not None:
                self.published.append(Published(run.namespace, tokens[:end], node))

    @rule(target=running, tokens=token_lists, namespace=namespaces, reserve=st.integers(0, 2))
    def admit(self, tokens: list[int], namespace: str, reserve: int) -> object:
        pool = self.pool
        data = array("i", tokens)
        match = pool.match(data, namespace, self.longest(tokens))
        assert match.num_tokens == self.expected_match(tokens, namespace)
        match = match.on_device(PAGE_TOKENS)
        before = (pool.free_pages, pool.pages.active, pool.lru.in_order(), pool.pages.refs.copy())
        self.serial += 1
        request_id = RequestId(str(self.serial))
        try:
            sequence, cached = pool.admit(
                request_id, data, namespace, match, reserve, tenant=TENANT_OF[namespace]
            )
        except PoolExhausted:
            fails = self.backing.refuse or self.memory.fail
            if not fails and not pool.host.room:
                after = (pool.free_pages, pool.pages.active, pool.lru.in_order(), pool.pages.refs)
                assert after == before
            if not fails and not pool.blocks.packed_blocks:
                moving = {move.transfer.page for move in pool.residency.moves.values()}
                refs = zip(pool.pages.refs, before[3], strict=True)  # a copy may hold its page now
                assert all(a == b for page, (a, b) in enumerate(refs) if page not in moving)
            if not fails:
                alone = not pool.sequences
                fits = pool.layout.pages_for(len(tokens)) + reserve <= pool.blocks.limit_pages
                pages = pool.pages
                busy = pages.quarantined or pages.pinned or pool.residency.moves
                busy = busy or pool.claimed.held
                assert not (alone and fits and not busy)
            return multiple()
        assert cached in (match.num_tokens, match.num_tokens - match.tail_tokens) or (
            (cached == 0 and len(pool.sequences) == 1 and pool.packing is not None)
            or (match.bounded and cached == pool.retention.held_pages(match) * PAGE_TOKENS)
        )
        self.queries += len(tokens)
        self.hits += cached
        for copy in sequence.copies:
            for offset, token in enumerate(self.memory.read(copy.source)[: copy.num_tokens]):
                assert token is not None
                self.memory.write(copy.target, offset, token)
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
            if not self.backing.refuse and not self.memory.fail:
                after = (list(sequence.pages), self.pool.free_pages, self.pool.lru.in_order())
                assert after == before
            return
        self.write(run, len(sequence.tokens))

    @rule(fail=st.booleans())
    def fail_moves(self, fail: bool) -> None:
        self.memory.fail = fail

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
        victims = self.pool.lru.in_order()
        excess = {
            number: self.pool.tenants.used_pages[number] - quota
            for number in range(len(self.pool.tenants.names))
            if (quota := self.pool.tenants.quota(number)) is not None
        }
        owner = list(self.pool.pages.owner)
        evicted = self.pool.reclaim(pages)
        if not self.pool.host.room:
            self.check_victims(
                [page for page in victims if page not in self.pool.lru], excess, owner
            )
        assert self.pool.occupied_pages <= before
        if not self.pool.host.room:
            assert evicted <= min(pages, cached)
            assert self.pool.occupied_pages == before - evicted
        if evicted:
            assert before > int(self.pool.watermarks.low * self.pool.capacity_pages)

    def check_victims(self, gone: list[int], excess: dict[int, int], owner: list[int]) -> None:
        """Others lose pages only when nobody who was above its quota has cached ones left over."""
        within = [page for page in gone if excess.get(owner[page], 0) <= 0]
        if not within:
            return
        for number, over in excess.items():
            left = sum(1 for page in self.pool.lru.in_order() if owner[page] == number)
            taken = sum(1 for page in gone if owner[page] == number)
            assert taken >= over or not left

    @rule(quotas=st.dictionaries(st.sampled_from(["ann", "bob"]), st.integers(0, 8)))
    def set_quotas(self, quotas: dict[str, int]) -> None:
        before = self.pool.lru.in_order()
        self.pool.set_quotas(quotas)
        assert self.pool.lru.in_order() == before

    @rule(which=st.integers(0, 50), ttl=st.sampled_from([None, 5.0, 60.0]), own=st.booleans())
    def pin(self, which: int, ttl: float | None, own: bool) -> None:
        live = [entry for entry in self.published if self.live(entry)]
        if not live:
            return
        entry = live[which % len(live)]
        pins = self.pool.pins
        tenant = self.pool.tenants.number(TENANT_OF[entry.namespace]) if own else None
        before = (pins.promised_pages, list(self.pool.pages.pins))
        try:
            pin = pins.pin(entry.node, ttl, "", tenant)
        except PinRefused:
            assert (pins.promised_pages, list(self.pool.pages.pins)) == before
            return
        assert pins.promised_pages <= max(before[0], pins.limit_pages)
        if pin.covered == len(pin.nodes):
            assert self.on_device(entry)

    @rule(which=st.integers(0, 20))
    def unpin(self, which: int) -> None:
        pins = list(self.pool.pins.by_node.values())
        if pins:
            self.pool.pins.release(pins[which % len(pins)])

    @rule(seconds=st.sampled_from([0.0, 3.0, 100.0]))
    def advance_pins(self, seconds: float) -> None:
        self.time += seconds
        before, started_at = list(self.pool.pins.by_node.values()), self.time
        self.pool.advance_pins()
        for pin in before:
            if pin.expires_at is not None and pin.expires_at <= started_at:
                assert pin.ended
            elif pin.expires_at is not None and pin.expires_at <= self.time:
                pass  # expired at one of the readings meanwhile
            elif pin.ended:  # what it waited for has gone
                assert not pin.nodes or pin.nodes[-1] in self.pool.pins.by_node

    @rule(which=st.integers(0, 50))
    def drop_prefix(self, which: int) -> None:
        live = [entry for entry in self.published if self.live(entry)]
        if live:
            before = self.pool.occupied_pages
            freed, _ = self.pool.drop_prefix(live[which % len(live)].node)
            assert self.pool.occupied_pages == before - freed

    @rule(tokens=token_lists, namespace=namespaces)
    def restore(self, tokens: list[int], namespace: str) -> None:
        match = self.pool.match(array("i", tokens), namespace)
        present = [node for node in match.nodes if node.page is not None]
        passes = self.pool.counters.eviction_passes
        try:
            self.pool.restore(match, TENANT_OF[namespace])
        except PoolExhausted:
            return
        coming = self.pool.residency.arriving.keys() | self.pool.disk.reading.keys()
        room_comes = any(move.then_evict for move in self.pool.residency.moves.values())
        room_comes |= self.pool.counters.eviction_passes > passes
        assert all(node in coming for node in match.missing) or room_comes
        assert all(node.page is not None for node in present)

    @rule(tokens=token_lists, namespace=namespaces)
    def claim(self, tokens: list[int], namespace: str) -> None:
        self.pool.claimed.release()
        match = self.pool.match(array("i", tokens), namespace).on_device(PAGE_TOKENS)
        self.pool.claimed.extend(match.nodes)
        assert self.pool.claimed.held == [node.page for node in match.nodes]

    @rule()
    def unclaim(self) -> None:
        self.pool.claimed.release()

    @rule(pages=st.integers(0, 6))
    def make_room(self, pages: int) -> None:
        self.pool.make_room(pages)

    @rule(host=st.sampled_from([0, 2, 30]))
    def limit_host(self, host: int) -> None:
        self.pool.host_limit_bytes = host * PAGE_BYTES
        assert self.pool.host.used <= max(host, self.pool.host.pinned)

    @rule()
    def start_copies(self) -> None:
        self.copying += self.pool.residency.take_orders()

    @rule(which=st.integers(0, 20), succeeds=st.sampled_from([True, True, True, False]))
    def end_copy(self, which: int, succeeds: bool) -> None:
        if not self.copying:
            return
        transfer = self.copying.pop(which % len(self.copying))
        if transfer.path == "d2h":
            assert self.pool.pages.state[transfer.page] != PageState.FREE
            data = self.memory.raw(transfer.page, transfer.packed)
            self.host_memory[transfer.slot] = transfer.packed, data
        elif succeeds:
            packed, data = self.host_memory[transfer.slot]
            assert packed == transfer.packed
            self.memory.put(transfer.page, packed, data)
        self.pool.finish_transfer(transfer.id, succeeds)
        late = self.pool.counters.late_transfers
        self.pool.finish_transfer(transfer.id, succeeds)  # a second report is only counted
        assert self.pool.counters.late_transfers == late + 1

    @rule(pages=st.integers(0, 5))
    def evict(self, pages: int) -> None:
        self.pool.evict(pages)

    @rule()
    def flush(self) -> None:
        self.pool.flush()
        assert self.pool.pages.cached == 0
        assert self.pool.host.used == self.pool.host.pinned
        assert len(self.backing.committed) == self.pool.blocks.committed_blocks

    @rule(refuse=st.booleans())
    def device_memory(self, refuse: bool) -> None:
        self.backing.refuse = refuse

    @rule(pages=st.integers(1, 9))
    def defragment(self, pages: int) -> None:
        blocks = self.pool.blocks
        before, used, surplus = blocks.used_blocks, blocks.used_pages, blocks.surplus_blocks
        moves = self.pool.relocator.plan(pages)
        assert len(moves) <= pages
        assert not moves or surplus > 0
        assert all(self.pool.pages.state[move.target] == PageState.FREE for move in moves)
        order = self.pool.lru.in_order()
        if moves and self.pool.mover is None:
            self.memory.fail = False
            self.memory.move(moves)
        if moves and self.memory.fail:
            with pytest.raises(RuntimeError):
                self.pool.relocate(moves)
            assert self.pool.lru.in_order() == order
            return
        self.pool.relocate(moves)
        renamed = {move.source: move.target for move in moves}
        assert self.pool.lru.in_order() == [renamed.get(page, page) for page in order]
        assert blocks.used_pages == used
        assert blocks.used_blocks <= before
        emptied = {move.source // blocks.slots_per_block for move in moves}
        emptied &= set(blocks.empty_since)
        assert not moves or emptied or len(moves) == pages

    @rule(pages=st.integers(1, MOST_PAGES), needed=st.integers(0, 6))
    def set_limit(self, pages: int, needed: int) -> None:
        pool = self.pool
        before = pool.blocks.limit_pages, pool.occupied_pages
        self.limit.configure(pages)
        self.limit.advance(None, lambda: needed)
        assert pool.occupied_pages == before[1]
        floor = needed + pool.pages.pinned + pool.pages.quarantined
        assert pages <= pool.blocks.limit_pages <= max(pages, min(before[0], floor))
        more = pool.blocks.packed_pages_per_block - PAGES_PER_BLOCK
        places = pool.blocks.limit_pages + pool.blocks.packed_blocks * more
        assert pool.capacity_pages == max(places, pool.occupied_pages)
        if pool.blocks.taken_pages <= pages:
            assert self.limit.waits_for in (None, "moves", "requests")

    @rule(blocks=st.integers(0, 4))
    def grow_ahead(self, blocks: int) -> None:
        before = self.pool.blocks.committed_blocks
        with contextlib.suppress(OutOfDeviceMemory):
            grown = self.pool.blocks.commit_ahead(blocks)
            assert self.pool.blocks.committed_blocks == before + grown
        assert self.pool.blocks.committed_blocks <= max(before, self.pool.blocks.limit_blocks)

    @rule(blocks=st.integers(0, 4))
    def give_back(self, blocks: int) -> None:
        empty = list(self.pool.blocks.empty_since)
        given = self.pool.blocks.decommit_empty(blocks)
        assert given == min(blocks, len(empty))
        assert not self.backing.committed & set(empty[:given]), "longest empty first"

    @rule(marks=st.sampled_from([(0.5, 0.2), (0.9, 0.7)]))
    def tune(self, marks: tuple[float, float]) -> None:
        self.pool.watermarks.high, self.pool.watermarks.low = marks

    @rule(tokens=token_lists, namespace=namespaces)
    def probe(self, tokens: list[int], namespace: str) -> None:
        before = (self.pool.lru.in_order(), self.pool.pages.refs.copy())
        match = self.pool.match(array("i", tokens), namespace, self.longest(tokens))
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
            assert sum(counters.hit_tokens.values()) == self.hits
            assert self.hits + sum(counters.miss_tokens.values()) == self.queries
            for entry in self.published:  # what a pin covers never leaves the device
                page = entry.node.page
                if page is not None and self.pool.pages.pins[page]:
                    assert self.on_device(entry)
                    assert page not in self.pool.lru
            self.published = [entry for entry in self.published if self.live(entry)]

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for sequence in list(self.pool.sequences.values()):
            self.pool.release(sequence, 0)
        self.pool.claimed.release()
        for pin in list(self.pool.pins.by_node.values()):
            self.pool.pins.release(pin)
        assert sum(self.pool.pages.pins) == self.pool.pages.pinned == 0
        self.copying += self.pool.residency.take_orders()
        while self.copying:
            self.end_copy(0, True)
        assert self.pool.pages.active == 0
        assert len(self.pool.announced) == 0
        assert self.pool.residency.leaving == set()
        audit(self.pool)
        self.pool.flush()
        assert self.pool.host.used == 0
        assert self.pool.free_pages == self.pool.capacity_pages
        assert self.backing.committed == set()
        assert self.pool.tree.namespaces() == []
        assert self.pool.tree.num_nodes == 0
        assert sum(self.pool.tenants.used_pages) == 0


TEXTS = st.sampled_from([[n % 2] * 9 + [n // 2 % 2] * 8 + [n // 4] * 7 for n in range(8)])


class PackedPoolMachine(PoolMachine):
    """The same with pages of two formats, and more steps that lead to packed ones."""

    running = Bundle("running")

    @initialize(
        capacity=st.integers(7, MOST_PAGES),
        marks=st.sampled_from([(0.9, 0.5), (1.0, 0.99)]),
        host=st.sampled_from([0, 3, 30]),
        pin_limit=st.sampled_from([0.0, 0.5]),
        packed_bytes=st.sampled_from([5, 7]),
        first=st.sampled_from([0, 4]),
        recent=st.sampled_from([0, 4]),
    )
    def start(self, **given: Any) -> None:
        self.begin(**given)

    @rule(target=running, tokens=TEXTS, namespace=namespaces)
    def serve(self, tokens: list[int], namespace: str) -> object:
        """A whole prompt, packed as far as may be."""
        run = self.admit(tokens, namespace, 0)
        if isinstance(run, Running):
            self.compute(run, len(tokens))
            self.pack(run, 0)
        return run

    @rule(tokens=TEXTS, namespace=namespaces)
    def serve_and_end(self, tokens: list[int], namespace: str) -> None:
        """What is cached then is packed."""
        run = self.serve(tokens, namespace)
        if isinstance(run, Running):
            self.finish(run)

    @rule(which=st.integers(0, 50))
    def bring_up(self, which: int) -> None:
        """What was copied to the host and evicted comes back."""
        live = [entry for entry in self.published if self.live(entry) and not self.on_device(entry)]
        if not live:
            return
        entry = live[which % len(live)]
        self.restore([*entry.tokens, 0], entry.namespace)
        self.start_copies()
        while self.copying:
            self.end_copy(0, True)

    @rule(pages=st.integers(1, MOST_PAGES))
    def offload(self, pages: int) -> None:
        """Evict, with all copies that it takes."""
        self.evict(pages)
        self.start_copies()
        while self.copying:
            self.end_copy(0, True)

    @rule(run=running, fewer=st.integers(0, 3))
    def grab(self, run: Running, fewer: int) -> None:
        """Whatever is promised can be had, and not a page more."""
        pool, sequence = self.pool, run.sequence
        if sequence.request_id not in pool.sequences:
            return
        promised = pool.obtainable_pages
        count = max(0, promised - fewer)
        if self.backing.refuse or self.memory.fail:
            return
        pool.grow(sequence, (sequence.span_pages + count) * PAGE_TOKENS)
        if not pool.residency.moves:  # pages that are copied are counted with care
            assert pool.obtainable_pages >= promised - count
        if count == promised:
            with pytest.raises(PoolExhausted):
                pool.grow(sequence, sequence.span_pages * PAGE_TOKENS + 1)
        self.write(run, run.num_computed)

    @rule(run=running, short=st.integers(0, 6))
    def pack(self, run: Running, short: int) -> None:
        """What is packed is due for everybody who holds it, and reads the same as before."""
        pool, sequence = self.pool, run.sequence
        if sequence.request_id not in pool.sequences or pool.packing is None:
            return
        pool.copied(sequence)
        length = max(0, run.num_computed - short)
        due = pool.packing.packed_pages(length)
        formats = {each: self.formats(each) for each in pool.sequences.values()}
        before = (pool.free_pages, pool.lru.in_order(), pool.pages.refs.copy())
        obtainable = pool.obtainable_pages
        counters, calls = pool.counters, len(self.memory.calls)
        failed, evicted = counters.packing_failed, counters.evicted["allocation"]
        count = pool.pack(sequence, length)
        evicts = counters.evicted["allocation"] > evicted
        if not count and len(self.memory.calls) == calls and not evicts:
            assert (pool.free_pages, pool.lru.in_order(), pool.pages.refs) == before
        assert not count or counters.packing_failed == failed
        changed = self.newly_packed(sequence, formats)
        assert len(changed) == count
        assert set(changed) <= set(due)
        for other in pool.sequences.values():
            also = self.newly_packed(other, formats)
            assert set(also) <= set(changed) & set(range(other.packing_stop)) & set(other.rewritten)
        slack = PAGES_PER_BLOCK - 1  # of a block that was opened for the first page of it
        assert pool.obtainable_pages >= obtainable - slack or pool.residency.moves
        self.write(run, run.num_computed)

    def formats(self, sequence: PoolSequence) -> list[bool]:
        return [self.pool.blocks.is_packed(page) for page in sequence.pages]

    def newly_packed(
        self, sequence: PoolSequence, before: dict[PoolSequence, list[bool]]
    ) -> list[int]:
        pairs = zip(before[sequence], self.formats(sequence), strict=True)
        return [index for index, (was, now) in enumerate(pairs) if now and not was]


TestPoolMachine = PoolMachine.TestCase
TestPackedPoolMachine = PackedPoolMachine.TestCase
