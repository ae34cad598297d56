"""Which pages of waiting requests come up from the host, and when waiting for them ends."""

from collections.abc import Callable, Sequence

from memd.engine.limits import SchedulerLimits
from memd.engine.request import Request
from memd.errors import PoolExhausted
from memd.pool.pool import Pool
from memd.pool.sequence import PrefixMatch

MAX_LOOKUPS = 4  # waiting requests looked up in one step, beyond those whose turn it is


class Prefetcher:
    """Brings up the pages of the request whose turn it is, and then of those expected soon.

    Only the first gets pages at the cost of others, and keeps what has arrived; so requests never
    keep each other from starting, nor push each other's pages out (cases: vLLM #45388).

    Args:
        pool: The KV memory.
        limits: Budgets; read afresh each time.
        clock: Monotonic seconds.
    """

    def __init__(self, pool: Pool, limits: SchedulerLimits, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._limits = limits
        self._clock = clock
        self._claimant: Request | None = None  # whom arrived pages are kept for

    def bring_up(self, request: Request, match: PrefixMatch) -> bool:
        """Ask for what the next to start has in lower tiers, and keep what is back.

        Returns:
            Whether it should wait; if not, the pool may have changed and recomputing is left.
        """
        if self._claimant is not request:
            self.release()
            match = self._pool.match(request.tokens, request.namespace, request.max_length)
        now = self._clock()
        late = request.restore_until is not None and now > request.restore_until
        if late or not self._restore(request, match):
            self.release()
            return False
        self._claimant = request
        self._claim(match)
        if request.restore_until is None:
            request.restore_until = now + self._limits.prefetch_timeout_seconds
        return True

    def keep(self, request: Request) -> None:
        """A request whose pages are all back cannot start yet; keep them, if it has the claim."""
        if self._claimant is request:
            match = self._pool.match(request.tokens, request.namespace, request.max_length)
            self._claim(match)

    def release(self, request: Request | None = None) -> bool:
        """Let go what is kept, for a request or for whomever; whether there was anything."""
        if self._claimant is None or request not in (None, self._claimant):
            return False
        self._claimant = None
        self._pool.claimed.release()
        return True

    def look_ahead(self, waiting: Sequence[Request]) -> None:
        """Bring up pages of those expected to start within the next steps, and keep them.

        As many as fit below the low mark beside what is held: background reclaim, which stops
        there, then takes others. What is in their way goes to the host.
        """
        pool, limits = self._pool, self._limits
        if not waiting or not (pool.host.used or len(pool.disk.index)):
            return
        expected_tokens = limits.prefetch_lookahead * limits.max_batch_tokens
        room = int(pool.watermarks.low * pool.capacity_pages)
        room -= pool.capacity_pages - pool.free_pages - pool.pages.cached
        most = limits.reclaim_pages_per_step + limits.max_batch_tokens // pool.layout.page_tokens
        victims = set(pool.residency.victims(most))  # of what a step may evict
        for request in waiting[:MAX_LOOKUPS]:
            if request.sampling.prompt_logprobs is not None:
                continue
            match = pool.match(request.tokens, request.namespace, request.max_length)
            missing = len(match.missing) + len(match.files)
            pages = [node.page for node in match.nodes if node.page is not None]
            resting = [page for page in pages if page in pool.lru]
            room -= missing + len(resting)
            if expected_tokens <= 0 or room < 0:
                return
            if not victims.isdisjoint(resting):
                pool.claimed.refresh(resting)
            if missing and request is not self._claimant:
                if pool.restored_pages(match) > max(0, pool.blocks.free_full_pages):
                    pool.make_room(missing)
                    return
                self._restore(request, match, ahead=True)
            expected_tokens -= len(request.tokens) - match.num_tokens

    def _claim(self, match: PrefixMatch) -> None:
        self._pool.claimed.extend(match.on_device(self._pool.layout.page_tokens).nodes)

    def _restore(self, request: Request, match: PrefixMatch, ahead: bool = False) -> bool:
        """Order copies, unless too many are under way; False when none can be ordered."""
        limits, page_tokens = self._limits, self._pool.layout.page_tokens
        window_pages = limits.prefetch_window * limits.max_batch_tokens // page_tokens
        if self._pool.residency.arriving and len(self._pool.residency.arriving) >= window_pages:
            return True
        try:
            self._pool.restore(match, request.tenant, ahead)
        except PoolExhausted:
            return False
        return True
