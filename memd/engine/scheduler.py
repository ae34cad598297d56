"""Decides what the next step computes. Pure bookkeeping over the pool: no tensors, no messages."""

import logging
from bisect import insort
from collections.abc import Callable, Iterable, Iterator

from memd.engine.counters import SchedulerCounters
from memd.engine.limits import SchedulerLimits, check_fits, next_tokens
from memd.engine.messages import PinWish
from memd.engine.plan import Chunk, StepPlan
from memd.engine.prefetch import Prefetcher
from memd.engine.request import Request
from memd.engine.shares import Shares
from memd.errors import PoolExhausted
from memd.pool.pins import PinRefused
from memd.pool.pool import Pool
from memd.pool.sequence import PoolSequence, PrefixMatch
from memd.types import RequestId

logger = logging.getLogger(__name__)

PROMPT_LOGPROBS_CHUNK = 256  # rows of full-vocabulary logits held at once
GROWTH_STEPS = 4  # how far ahead room is made for the next page of a running sequence
MAX_STARTS = 64  # in one step: each takes the host a tenth of a millisecond
MAX_PASSED_OVER = 16  # waiting requests looked up in vain in one step


class Scheduler:
    """Continuous batching with chunked prefill under a token budget.

    Each step has a token of every decoding sequence, and prompt tokens up to the budget: neither
    keeps the other from going on. Requests start by priority, then by their tenant's share, then by
    arrival, when their prompt and a reserve for its output fit, and when what lower tiers have of
    them is back on the device. While others wait for room, those of a tenant
    above its quota come after all of them. When a running sequence cannot grow, the last to come
    among those never preempted gives way, one of a tenant above its quota first: it is published,
    released, and queued again at its old place, to be resumed by a prefix match. It then starts
    only when its whole length fits beside what others have in reserve, so nobody is preempted
    twice.

    Args:
        pool: The KV memory.
        limits: Budgets; read afresh at each step.
        max_model_len: Longest prompt plus output served.
        clock: Monotonic seconds.
    """

    def __init__(
        self, pool: Pool, limits: SchedulerLimits, max_model_len: int, clock: Callable[[], float]
    ) -> None:
        self.limits = limits
        self.max_model_len = max_model_len
        self.counters = SchedulerCounters()
        self.requests: dict[RequestId, Request] = {}
        self.running: list[Request] = []  # by order
        self.waiting: list[Request] = []  # by order
        self.waiting_for: dict[RequestId, str] = {}  # "capacity", "quota", "prefix", "transfer"
        self.shares = Shares()
        self._refused: Request | None = None  # the first that the last step had no pages for
        self._short = False  # a tenant within its quota waits for pages
        self._free_slots = list(range(limits.max_sequences - 1, -1, -1))
        self._prefetcher = Prefetcher(pool, limits, clock)
        self._pool = pool
        self._clock = clock

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served: empty, too long for the model or for the whole
            pool.
        """
        check_fits(
            request.prompt_length, request.sampling.max_tokens, self.max_model_len, self._pool
        )
        self.requests[request.id] = request
        self.shares.enter(request.account)
        insort(self.waiting, request, key=lambda waiting: waiting.order)

    def schedule(self) -> StepPlan:
        """Plan the next step; without chunks when there is nothing to compute.

        Pages of all chunks are allocated when this returns.
        """
        self._pool.advance_pins()
        decodes, partial = self._decodes()
        budget = self.limits.max_batch_tokens
        prefills: list[Chunk] = []
        for request in partial:
            if budget > 0:
                prefills.append(self._chunk(request, budget))
                budget -= prefills[-1].count
        for request in self._admit(budget):
            chunk = self._chunk(request, budget)
            (prefills if request.num_remaining > 1 else decodes).append(chunk)
            budget -= chunk.count
        self._prefetcher.look_ahead(self.waiting)
        if self._pool.host.room:
            self._pool.make_room(self._pages_needed_soon())
        self._pool.reclaim(self.limits.reclaim_pages_per_step)
        return StepPlan(decodes, prefills, self._starved())

    def preempt(self, request: Request) -> None:
        """Publish and release a running request's pages and queue it again at its old place."""
        assert request.sequence is not None
        request.peak_pages = request.usage.peak_pages
        self._pool.release(request.sequence, request.num_computed)
        self._stop(request)
        request.num_computed = 0
        request.prompt_logprobs.clear()
        request.preemptions += 1
        self.counters.stalls.begin(request, "preempted", self._clock())
        self.counters.preemptions += 1
        insort(self.waiting, request, key=lambda waiting: waiting.order)

    def set_priority(self, request: Request, priority: int) -> None:
        """Give a request another place in the order; what it holds it keeps."""
        queue = self.waiting if request.sequence is None else self.running
        queue.remove(request)
        request.priority = priority
        insort(queue, request, key=lambda each: each.order)

    def finish(self, request: Request, keep: bool = True) -> None:
        """Take a request out, whatever its state; its pages stay cached unless told otherwise."""
        if request.sequence is not None:
            self._pool.release(request.sequence, request.num_computed, keep)
            self._stop(request)
        else:
            self.waiting.remove(request)
        self._prefetcher.release(request)
        self.waiting_for.pop(request.id, None)
        self.shares.leave(request.account)
        del self.requests[request.id]
        request.ended = True

    def launched(self, plan: StepPlan) -> None:
        """A plan is on its way: what comes next can be planned as if it were done."""
        for chunk in plan.chunks:
            chunk.request.num_computed = chunk.stop
            if chunk.samples and chunk.request.sampling.max_tokens:
                chunk.request.in_flight += 1

    def completed(self, chunks: list[Chunk]) -> None:
        """The forward pass of running requests' chunks is done: their full pages are published."""
        page_tokens = self._pool.layout.page_tokens
        self.shares.charge_each(chunk.request.account for chunk in chunks if chunk.samples)
        for chunk in chunks:
            request, sequence = chunk.request, chunk.request.sequence
            assert sequence is not None
            if sequence.copies:
                self._pool.copied(sequence)
            if chunk.stop >= (sequence.sealed_pages + 1) * page_tokens:
                self._pool.publish(sequence, chunk.stop)
            if request.pin is not None:
                self._pin(request, sequence, request.pin)

    def _pin(self, request: Request, sequence: PoolSequence, pin: PinWish) -> None:
        """Pin what a request asked for, once all of it is published."""
        pages = pin.tokens // self._pool.layout.page_tokens
        pages = min(pages, self._pool.retention.publishable_pages(sequence))
        if sequence.sealed_pages < pages:
            return
        request.pin = None
        if not pages:
            return
        node = sequence.node
        for _ in range(sequence.sealed_pages - pages):
            node = self._pool.tree.page_parent(node)
        try:
            self._pool.pins.pin(node, pin.ttl_seconds, pin.label, sequence.tenant)
            request.pinned_tokens = pages * self._pool.layout.page_tokens
        except PinRefused as error:
            logger.info("request %s: %s", request.id, error)

    def _stop(self, request: Request) -> None:
        """A request whose pages have been released runs no more."""
        assert request.slot is not None
        self._free_slots.append(request.slot)
        self.running.remove(request)
        request.sequence, request.slot, request.packed_tokens = None, None, 0

    def _decodes(self) -> tuple[list[Chunk], list[Request]]:
        """Running sequences with one token to compute, which they have room for, and the others."""
        decodes: list[Chunk] = []
        partial: list[Request] = []
        preemptions = self.counters.preemptions
        page_tokens = self._pool.layout.page_tokens
        for request in list(self.running):
            sequence, remaining = request.sequence, request.num_remaining
            if sequence is None or not remaining:
                continue
            next_count = 1 if remaining == 1 else next_tokens(request, self._pool)
            wanted = request.num_computed + next_count
            if wanted > sequence.span_pages * page_tokens:
                self._grow(request, wanted)
            if remaining > 1:
                partial.append(request)
                continue
            decodes.append(Chunk(request, request.num_computed, 1, True))
        if self.counters.preemptions != preemptions:
            decodes = [chunk for chunk in decodes if chunk.request.sequence is not None]
            partial = [request for request in partial if request.sequence is not None]
        return decodes, partial

    def _chunk(self, request: Request, budget: int) -> Chunk:
        count = min(next_tokens(request, self._pool), budget)
        if request.sampling.prompt_logprobs is not None:
            count = min(count, PROMPT_LOGPROBS_CHUNK)
        return Chunk(request, request.num_computed, count, count == request.num_remaining)

    def _grow(self, request: Request, num_tokens: int) -> None:
        """Make room for a running request's next tokens, preempting others or itself if need be."""
        while request.sequence is not None:
            self._pool.retention.let_go(request.sequence, request.num_computed, num_tokens)
            try:
                self._pool.grow(request.sequence, num_tokens)
                return
            except PoolExhausted:
                if not self._prefetcher.release():
                    self.preempt(self._victim())

    def _victim(self) -> Request:
        """The running request that gives way: the last in order of those never preempted, one of a
        tenant above its quota if there is any.
        """
        fresh = [request for request in self.running if not request.preemptions]
        if not fresh:
            return self.running[-1]
        over = [request for request in fresh if self._over_quota(request)]
        return (over or fresh)[-1]

    def _over_quota(self, request: Request) -> bool:
        return self._pool.tenants.over_quota(request.tenant)

    def _admit(self, budget: int) -> Iterable[Request]:
        """Start waiting requests in order, as far as tokens, slots and pages go.

        One that would compute the same pages as a running request is passed over until they are
        there.
        """
        self.waiting_for = {
            request.id: "quota" if self._short and self._over_quota(request) else "capacity"
            for request in self.waiting
        }
        self._refused = None
        if not self.waiting:
            self._short = False
            return
        reserved_pages = sum(self._outstanding_pages(request) for request in self.running)
        bringing_up = passed_over = False
        turns = self._in_turn()
        while budget > 0 and len(self.running) < self.limits.max_sequences:
            request = next(turns, None)
            if request is None:
                self._short = False
                return
            if passed_over and self._over_quota(request):
                continue
            if request.in_flight:  # preempted a moment ago: its last token is not known yet
                self.waiting_for[request.id] = "transfer"
                continue
            match = self._match(request)
            if match.awaited:
                self.waiting_for[request.id] = "prefix"
                continue
            if match.incomplete:
                if not bringing_up and not self._has_room(request, match, reserved_pages):
                    if self._refuse(request):
                        return
                    passed_over = True
                    continue
                if bringing_up or self._prefetcher.bring_up(request, match):
                    bringing_up = True
                    self.waiting_for[request.id] = "transfer"
                    self.counters.stalls.begin(request, "transfer", self._clock())
                    continue
                match = self._match(request).on_device(self._pool.layout.page_tokens)
            try:
                self._start(request, match, reserved_pages)
            except PoolExhausted:
                if self._refuse(request):
                    self._prefetcher.keep(request)
                    return
                passed_over = True
                continue
            reserved_pages += self._outstanding_pages(request)
            budget -= min(next_tokens(request, self._pool), budget)
            self._short = self._short and self._over_quota(request)
            yield request

    def _refuse(self, request: Request) -> bool:
        """There are no pages for a request; returns whether those after it have to wait as well."""
        self.counters.stalls.begin(request, "allocation", self._clock())
        self.waiting_for[request.id] = "capacity"
        self._refused = self._refused or request
        if self._over_quota(request):
            return False
        self._short = True
        return True

    def _in_turn(self) -> Iterator[Request]:
        """Waiting requests in the order in which they may start, as many as a step has time for."""
        starts = passed_over = 0
        for request in self.shares.in_turn(
            self.waiting, lambda request: self._short and self._over_quota(request)
        ):
            yield request
            if request.sequence is None:
                passed_over += 1
            else:
                starts += 1
            if starts == MAX_STARTS or passed_over == MAX_PASSED_OVER:
                return

    def _starved(self) -> list[Request]:
        """A request that cannot get its pages although nothing runs that could free some."""
        if not self.waiting or self.running or self._pool.residency.moves:
            return []
        return [] if self._refused is None else [self._refused]

    def _match(self, request: Request) -> PrefixMatch:
        match = self._pool.match(request.tokens, request.namespace, request.max_length)
        whole = request.sampling.prompt_logprobs is not None  # logits of all prompt tokens
        return match.leading(0, self._pool.layout.page_tokens) if whole else match

    def _reserve(self, request: Request, match: PrefixMatch) -> tuple[int, int]:
        """Tokens and pages kept for a request's output: all of it once it has been preempted."""
        length = len(request.tokens)
        room = request.max_length - length
        if not request.preemptions:
            room = min(room, self.limits.reserve_tokens)
        return room, self._pool.reserve_pages(match, length, length + room)

    def _has_room(self, request: Request, match: PrefixMatch, reserved_pages: int) -> bool:
        """Whether a request could start if all that it has in lower tiers were back."""
        pool = self._pool
        held = match.leading(pool.retention.held_pages(match), pool.layout.page_tokens)
        first = pool.retention.first_pages(len(request.tokens), match.num_tokens)
        wanted = first + pool.restored_pages(held) - len(held.nodes)
        return wanted + self._reserve(request, match)[1] + reserved_pages <= pool.obtainable_pages

    def _start(self, request: Request, match: PrefixMatch, reserved_pages: int) -> None:
        length = len(request.tokens)
        room, reserve = self._reserve(request, match)
        request.sequence, request.num_computed = self._pool.admit(
            request.id,
            request.tokens,
            request.namespace,
            match,
            reserve + reserved_pages,
            count_lookup=request.cached_tokens is None and not request.num_generated,
            tenant=request.tenant,
        )
        request.slot = self._free_slots.pop()
        request.reserved_tokens = length + room
        request.restore_until = None
        self._prefetcher.release(request)
        self.shares.charge(request.account, request.num_remaining)
        self.waiting.remove(request)
        self.waiting_for.pop(request.id, None)
        insort(self.running, request, key=lambda running: running.order)
        self._account_start(request)

    def _account_start(self, request: Request) -> None:
        now = self._clock()
        self.counters.stalls.end(request, now)
        if request.cached_tokens is None:
            assert request.sequence is not None
            request.cached_tokens = request.num_computed
            request.restored_tokens = request.sequence.restored_tokens
            request.missed = request.sequence.miss
            request.queue_seconds = now - request.submitted_at
            self.counters.queue_seconds.observe(request.queue_seconds)
            if request.num_generated:  # an engine before this one has counted its prompt
                self.counters.recomputed_tokens += len(request.tokens) - 1 - request.num_computed
                return
            self.counters.prompt_tokens += request.prompt_length
            restored = request.restored_tokens
            self.counters.cached_tokens["device"] += request.num_computed - sum(restored.values())
            for tier, count in restored.items():
                self.counters.cached_tokens[tier] += count
        elif request.preemptions:
            self.counters.recomputed_tokens += len(request.tokens) - 1 - request.num_computed

    def _pages_needed_soon(self) -> int:
        """Pages that running sequences will ask for within the next steps."""
        page_tokens = self._pool.layout.page_tokens
        return sum(
            1 for request in self.running if -len(request.tokens) % page_tokens < GROWTH_STEPS
        )

    def _outstanding_pages(self, request: Request) -> int:
        """Pages kept in reserve for a running request that it has not taken yet."""
        assert request.sequence is not None
        return self._pool.retention.outstanding_pages(request.sequence, request.reserved_tokens)
