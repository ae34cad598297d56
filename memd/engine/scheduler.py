"""Decides what the next step computes. Pure bookkeeping over the pool: no tensors, no messages."""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from memd.engine.limits import SchedulerLimits
from memd.engine.prefetch import Prefetcher
from memd.engine.request import Request
from memd.engine.shares import TenantShares
from memd.errors import PoolExhausted, RequestError
from memd.histogram import LATENCY, HistogramCounts
from memd.pool.pool import Pool
from memd.pool.sequence import PrefixMatch
from memd.types import RequestId

PROMPT_LOGPROBS_CHUNK = 256  # rows of full-vocabulary logits held at once
PREFILL_SHARE = 4  # prefill has at least this part, 1 / 4, of a step's tokens
GROWTH_STEPS = 4  # how far ahead room is made for the next page of a running sequence
MAX_LOOKUPS = 16  # waiting requests looked up in one step: bounds the cost of a long queue


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of a request to compute, from its `num_computed` on."""

    request: Request
    count: int

    @property
    def samples(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.request.num_computed + self.count == len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: sequences with one token to compute, then pieces of longer ones.

    `starved` requests cannot get their pages although nothing else runs: they have to fail.
    """

    decodes: list[Chunk]
    prefills: list[Chunk]
    starved: list[Request] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        return self.decodes + self.prefills

    @property
    def mode(self) -> str:
        """`decode`, `prefill` or `mixed`."""
        if not self.prefills:
            return "decode"
        return "mixed" if self.decodes else "prefill"


@dataclass(slots=True)
class SchedulerCounters:
    """Running totals since the start."""

    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0  # looked up at first admission
    cached_tokens: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0})
    queue_seconds: HistogramCounts = field(default_factory=lambda: HistogramCounts(LATENCY))
    stall_seconds: HistogramCounts = field(default_factory=lambda: HistogramCounts(LATENCY))


class Scheduler:
    """Continuous batching with chunked prefill under a token budget.

    Decoding sequences come first, so a long prefill never holds them up by more than its budget;
    of the budget a part is prefill's in any case. Requests start by priority, then by their
    tenant's share, then by arrival, when their prompt and a reserve for its output fit, and when
    what the host has of them is back on the device. When a running sequence cannot
    grow, the last to come among those never preempted gives way: it is published, released, and
    queued again at its old place, to be resumed by a prefix match. It then starts only when its
    whole length fits beside what others have in reserve, so nobody is preempted twice.

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
        self.waiting_for: dict[RequestId, str] = {}  # "capacity", "prefix" or "transfer"
        self._shares = TenantShares()
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
        self._shares.enter(request.tenant)
        insort(self.waiting, request, key=lambda waiting: waiting.order)

    def schedule(self) -> StepPlan:
        """Plan the next step; without chunks when there is nothing to compute.

        Pages of all chunks are allocated when this returns.
        """
        for request in list(self.running):
            if request.sequence is not None and request.num_remaining == 1:
                self._grow(request)
        budget = self.limits.max_batch_tokens
        decodes = [Chunk(request, 1) for request in self.running if request.num_remaining == 1]
        budget = max(budget - len(decodes), budget // PREFILL_SHARE)
        prefills: list[Chunk] = []
        for request in self.running:
            if request.num_remaining > 1 and budget > 0:
                prefills.append(self._chunk(request, budget))
                budget -= prefills[-1].count
        for request in self._admit(budget):
            chunk = self._chunk(request, budget)
            (prefills if request.num_remaining > 1 else decodes).append(chunk)
            budget -= chunk.count
        self._prefetcher.look_ahead(self.waiting)
        self._pool.make_room(self._pages_needed_soon())
        self._pool.reclaim(self.limits.reclaim_pages_per_step)
        return StepPlan(decodes, prefills, self._starved())

    def preempt(self, request: Request) -> None:
        """Publish and release a running request's pages and queue it again at its old place."""
        assert request.sequence is not None
        self._pool.release(request.sequence, request.num_computed)
        self.running.remove(request)
        request.sequence = None
        request.num_computed = 0
        request.prompt_logprobs.clear()
        request.preemptions += 1
        request.preempted_at = self._clock()
        self.counters.preemptions += 1
        insort(self.waiting, request, key=lambda waiting: waiting.order)

    def finish(self, request: Request, keep: bool = True) -> None:
        """Take a request out, whatever its state; its pages stay cached unless told otherwise."""
        if request.sequence is not None:
            self._pool.release(request.sequence, request.num_computed, keep)
            request.sequence = None
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._prefetcher.release(request)
        self.waiting_for.pop(request.id, None)
        self._shares.leave(request.tenant)
        del self.requests[request.id]

    def completed(self, chunk: Chunk) -> None:
        """A chunk's forward pass is done: its tokens are computed and its full pages published."""
        request = chunk.request
        assert request.sequence is not None
        request.num_computed += chunk.count
        if chunk.samples:
            self._shares.charge(request.tenant, 1)
        self._pool.copied(request.sequence)
        self._pool.publish(request.sequence, request.num_computed)

    def _chunk(self, request: Request, budget: int) -> Chunk:
        count = min(request.num_remaining, budget)
        if request.sampling.prompt_logprobs is not None:
            count = min(count, PROMPT_LOGPROBS_CHUNK)
        return Chunk(request, count)

    def _grow(self, request: Request) -> None:
        """Make room for a decoding request's next token, preempting others or itself if need be."""
        while request.sequence is not None:
            try:
                self._pool.grow(request.sequence, len(request.tokens))
                return
            except PoolExhausted:
                if not self._prefetcher.release():
                    self.preempt(self._victim())

    def _victim(self) -> Request:
        """The running request that gives way: the last in order of those never preempted."""
        for request in reversed(self.running):
            if not request.preemptions:
                return request
        return self.running[-1]

    def _admit(self, budget: int) -> Iterable[Request]:
        """Start waiting requests in order, as far as tokens, slots and pages go.

        One that would compute the same pages as a running request is passed over until they are
        there.
        """
        self.waiting_for = {request.id: "capacity" for request in self.waiting}
        reserved_pages = sum(self._outstanding_pages(request) for request in self.running)
        bringing_up = False
        for request in self._in_turn():
            if budget <= 0 or len(self.running) >= self.limits.max_sequences:
                return
            match = self._match(request)
            if match.awaited:
                self.waiting_for[request.id] = "prefix"
                continue
            if match.missing:
                if not bringing_up and not self._has_room(request, match, reserved_pages):
                    return
                if bringing_up or self._prefetcher.bring_up(request, match):
                    bringing_up = True
                    self.waiting_for[request.id] = "transfer"
                    continue
                match = self._match(request).on_device(self._pool.layout.page_tokens)
            try:
                self._start(request, match, reserved_pages)
            except PoolExhausted:
                self._prefetcher.keep(request)
                return
            reserved_pages += self._outstanding_pages(request)
            budget -= min(request.num_remaining, budget)
            yield request

    def _in_turn(self) -> Iterator[Request]:
        """Waiting requests in the order in which they may start; each turn sees the last start."""
        if len(self._shares) < 2:
            yield from self.waiting[:MAX_LOOKUPS]
            return
        tried: set[RequestId] = set()
        while len(tried) < MAX_LOOKUPS:
            left = [request for request in self.waiting if request.id not in tried]
            if not left:
                return
            turn = min(
                left,
                key=lambda request: (
                    request.priority,
                    self._shares.charged(request.tenant),
                    request.arrival,
                ),
            )
            tried.add(turn.id)
            yield turn

    def _starved(self) -> list[Request]:
        """A request that cannot get its pages although nothing runs that could free some."""
        if not self.waiting or self.running or self._pool.residency.moves:
            return []
        first = self.waiting[0]
        return [first] if self.waiting_for[first.id] == "capacity" else []

    def _match(self, request: Request) -> PrefixMatch:
        if request.sampling.prompt_logprobs is not None:  # logits of every prompt token are wanted
            return self._pool.no_match()
        return self._pool.match(request.tokens, request.namespace)

    def _reserve(self, request: Request) -> tuple[int, int]:
        """Tokens and pages kept for a request's output: all of it once it has been preempted."""
        pages_for = self._pool.layout.pages_for
        length = len(request.tokens)
        room = request.max_length - length
        if not request.preemptions:
            room = min(room, self.limits.reserve_tokens)
        return room, pages_for(length + room) - pages_for(length)

    def _has_room(self, request: Request, match: PrefixMatch, reserved_pages: int) -> bool:
        """Whether a request could start if all that it has on the host were back."""
        present = len(match.nodes) - len(match.missing)
        wanted = self._pool.layout.pages_for(len(request.tokens)) - present
        _, reserve = self._reserve(request)
        return wanted + reserve + reserved_pages <= self._pool.obtainable_pages

    def _start(self, request: Request, match: PrefixMatch, reserved_pages: int) -> None:
        length = len(request.tokens)
        room, reserve = self._reserve(request)
        request.sequence, request.num_computed = self._pool.admit(
            request.id,
            request.tokens,
            request.namespace,
            match,
            reserve + reserved_pages,
            count_lookup=request.cached_tokens is None,
        )
        request.reserved_tokens = length + room
        request.restore_until = None
        self._prefetcher.release(request)
        self._shares.charge(request.tenant, request.num_remaining)
        self.waiting.remove(request)
        self.waiting_for.pop(request.id, None)
        insort(self.running, request, key=lambda running: running.order)
        self._account_start(request)

    def _account_start(self, request: Request) -> None:
        now = self._clock()
        if request.cached_tokens is None:
            assert request.sequence is not None
            request.cached_tokens = request.num_computed
            request.restored_tokens = request.sequence.restored_tokens
            request.queue_seconds = now - request.submitted_at
            self.counters.prompt_tokens += len(request.tokens)
            self.counters.cached_tokens["host"] += request.restored_tokens
            self.counters.cached_tokens["device"] += request.num_computed - request.restored_tokens
            self.counters.queue_seconds.observe(request.queue_seconds)
        elif request.preempted_at is not None:
            self.counters.recomputed_tokens += len(request.tokens) - 1 - request.num_computed
            self.counters.stall_seconds.observe(now - request.preempted_at)

    def _pages_needed_soon(self) -> int:
        """Pages that running sequences will ask for within the next steps."""
        page_tokens = self._pool.layout.page_tokens
        return sum(
            1 for request in self.running if -len(request.tokens) % page_tokens < GROWTH_STEPS
        )

    def _outstanding_pages(self, request: Request) -> int:
        """Pages kept in reserve for a running request that it has not taken yet."""
        assert request.sequence is not None
        return max(
            0, self._pool.layout.pages_for(request.reserved_tokens) - len(request.sequence.pages)
        )


def check_fits(prompt_length: int, max_tokens: int, max_model_len: int, pool: Pool) -> None:
    """Refuse at once what can never be served.

    Raises:
        RequestError: with the numbers; code `context_length_exceeded`.
    """
    if prompt_length < 1:
        raise RequestError("the prompt has no tokens", "prompt")
    layout = pool.layout
    limit = f"This model's maximum context length is {max_model_len} tokens"
    needed = layout.pages_for(prompt_length)
    if needed > pool.capacity_pages:
        raise RequestError(
            f"{limit}: the prompt of {prompt_length} tokens needs {needed} pages of "
            f"{layout.page_tokens} tokens, the pool holds {pool.capacity_pages}.",
            "prompt",
            "context_length_exceeded",
        )
    if prompt_length + max_tokens > max_model_len:
        raise RequestError(
            f"{limit}, {prompt_length} tokens of prompt and {max_tokens} of output were asked for.",
            "prompt",
            "context_length_exceeded",
        )
