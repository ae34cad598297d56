"""The rules of the diagnosis: each looks at the facts and tells a cause, or nothing."""

from collections.abc import Callable, Iterable

from memd_dashboard import show
from memd_dashboard.view import tenants
from memd_dashboard.view.facts import Facts, Finding

_LEAST_TOKENS = 2_000  # too few prompts say nothing about hits
_LEAST_PAGES = 50  # too few pages say nothing about eviction


def _high_mark(given: Facts) -> Iterable[Finding]:
    """Allocations that find nothing free evict in the request's own time: latency peaks."""
    direct = given.grown("memd_direct_reclaimed_pages_total")
    allocated = given.grown("memd_pool_allocations_total")
    high, low = (
        given.settings.get("memory.watermark.high"),
        given.settings.get("memory.watermark.low"),
    )
    if direct < 1 or not isinstance(high, float) or not isinstance(low, float):
        return
    proposed = max(0.5, round(high - 0.1, 2))
    if proposed <= low:
        proposed = round(low + 0.02, 2)
    if proposed >= high:
        return
    share = direct / allocated if allocated else None
    p50 = given.window.quantile(0.5, "memd_inter_token_latency_seconds")
    p99 = given.window.quantile(0.99, "memd_inter_token_latency_seconds")
    peaks = (
        [f"Gaps between tokens: {show.duration(p99)} at p99 against {show.duration(p50)} at p50."]
        if p50 and p99 and p99 > 3 * p50
        else []
    )
    yield Finding(
        "The high mark is too high: requests evict pages themselves, which shows as latency peaks",
        min(0.9, 0.55 + 0.35 * min(1.0, (share or 0.0) * 5)),
        (
            f"{show.count(direct)} pages were reclaimed directly in "
            f"{show.duration(given.window.seconds)}"
            + (f", {show.share(share)} of those allocated." if share is not None else "."),
            f"Reclaim in the background starts at {show.share(high)} only, so little is free when "
            "many pages are needed at once.",
            *peaks,
        ),
        f"Start reclaim earlier: set the high mark to {show.share(proposed)}.",
        "memory.watermark.high",
        f"{100 * proposed:g}%",
    )


def _waiting(given: Facts) -> Iterable[Finding]:
    """Requests wait because what runs holds nearly everything."""
    waits = [row for row in given.waiting if row.get("waiting_for") in (None, "capacity")]
    active = given.window.last("memd_pool_active_ratio")
    if not waits or active is None or active < 0.8:
        return
    largest = max(given.requests, key=lambda row: row.get("pages") or 0)
    pages = largest.get("pages") or 0
    yield Finding(
        "Requests wait because running ones hold nearly the whole pool",
        0.75,
        (
            f"{len(waits)} requests wait for memory, the oldest for "
            f"{show.duration(max(row.get('age_seconds') or 0 for row in waits))}.",
            f"{show.share(active)} of the pool cannot be evicted.",
            f"The largest request, {largest.get('id')}, holds {show.count(pages)} pages.",
        ),
        "Give the pool more memory (memory.limit), or end what is too large.",
        page="requests",
    )


def _host(given: Facts) -> Iterable[Finding]:
    """Evicted pages are asked for again soon: the tier below is too small or not there."""
    evicted = given.grown("memd_evicted_pages_total")
    regretted = given.grown("memd_regretted_pages_total")
    if evicted < _LEAST_PAGES or regretted / evicted < 0.1:
        return
    pool = given.pool
    page_bytes = (pool.get("layout") or {}).get("page_bytes", 0)
    host = (pool.get("host_capacity_pages") or 0) * page_bytes
    evidence = [
        f"{show.count(regretted)} of {show.count(evicted)} evicted pages were asked for again "
        f"within {show.setting(given.settings.get('memory.regret_window'), 'seconds')}.",
        f"The host tier holds {show.size(host)}."
        if host
        else "There is no host tier: what is evicted is lost.",
    ]
    if recomputed := given.grown("memd_recomputed_tokens_total"):
        evidence.append(f"{show.count(recomputed)} tokens were computed again.")
    needed = max(2 * host, 2 * int(regretted) * page_bytes, 2**28)
    thrash = regretted / evicted > 0.5
    yield Finding(
        "The pool thrashes: most of what is evicted is needed again at once"
        if thrash
        else "The host tier is too small: evicted pages are needed again soon",
        0.8 if thrash else 0.5,
        tuple(evidence),
        "Make the host tier larger, so that evicted pages come back by a copy.",
        "memory.host.limit",
        f"{-(-needed // 2**20)}MiB",
    )


def _marks_near(given: Facts) -> Iterable[Finding]:
    """Reclaim that starts and stops all the time evicts what is needed."""
    ups = given.grown("memd_pool_watermark_crossings_total", level="high", direction="up")
    minutes = given.window.seconds / 60
    high, low = (
        given.settings.get("memory.watermark.high"),
        given.settings.get("memory.watermark.low"),
    )
    if (
        minutes < 1
        or ups / minutes < 6
        or not isinstance(high, float)
        or not isinstance(low, float)
    ):
        return
    if high - low >= 0.1:
        return
    yield Finding(
        "The marks are close together: reclaim starts and stops all the time",
        0.4,
        (
            f"The high mark was passed {show.count(ups)} times in "
            f"{show.duration(given.window.seconds)}.",
            f"Between the marks lie {show.share(high - low)} of the pool.",
        ),
        f"Set the low mark to {show.share(max(0.1, high - 0.2))}.",
        "memory.watermark.low",
        f"{100 * max(0.1, high - 0.2):g}%",
    )


def _misses(given: Facts) -> Iterable[Finding]:
    """Prompts that hardly hit though they are alike: something in front of them changes."""
    queried = given.grown("memd_prefix_query_tokens_total")
    hits = given.grown("memd_prefix_hit_tokens_total")
    cold = given.grown("memd_prefix_miss_tokens_total", reason="cold")
    if queried < _LEAST_TOKENS or hits / queried > 0.05 or cold / queried < 0.7:
        return
    starts = [row for row in given.prefixes if (row.get("start_token") or 0) == 0]
    unshared = [row for row in starts if not row.get("branches")]
    if len(starts) < 4 or len(unshared) < 0.9 * len(starts):
        return
    yield Finding(
        "Prompts share nothing: something at their beginning changes with each request",
        0.45,
        (
            f"Only {show.share(hits / queried)} of {show.count(queried)} prompt tokens were found.",
            f"{len(unshared)} of {len(starts)} cached prompts have no beginning in common.",
        ),
        "Put what changes (a date, an id) behind what stays the same; Explain shows where.",
        page="prefixes",
    )


def _tenant(given: Facts) -> Iterable[Finding]:
    """One tenant holds most of the pool while others wait."""
    held = sum(row.get("used_bytes") or 0 for row in given.tenants)
    if not held or len(given.tenants) < 2:
        return
    largest = max(given.tenants, key=lambda row: row.get("used_bytes") or 0)
    name = tenants.name_of(largest)
    others = [row for row in given.waiting if (row.get("tenant") or "") != largest.get("name")]
    share = (largest.get("used_bytes") or 0) / held
    if share < 0.6 or not others:
        return
    yield Finding(
        f"Tenant {name} fills the pool while others wait",
        0.7,
        (
            f"{name} holds {show.share(share)} of the memory in use.",
            f"{len(others)} requests of other tenants wait.",
        ),
        f"Give {name} a quota, so that it is evicted from first.",
        page="tenants",
    )


def _leak(given: Facts) -> Iterable[Finding]:
    """Pages that nobody holds and that are not free."""
    leaked = given.pool.get("leaked_pages") or 0
    if leaked:
        yield Finding(
            "Pages have leaked",
            0.85,
            (f"The last audit found {show.count(leaked)} pages that nobody holds.",),
            "Run the audit again: it repairs them. Keep its report, this is a bug of memd.",
            page="pool",
        )


def _quarantine(given: Facts) -> Iterable[Finding]:
    pages, capacity = (
        given.pool.get("quarantined_pages") or 0,
        given.pool.get("capacity_pages") or 0,
    )
    if capacity and pages / capacity > 0.01:
        yield Finding(
            "Pages are set aside after faults",
            0.6,
            (f"{show.count(pages)} pages ({show.share(pages / capacity)}) are quarantined.",),
            "Look for NaN or copy faults in the log, then run the audit: it gives them back.",
            page="pool",
        )


def _copies(given: Facts) -> Iterable[Finding]:
    """Pages fetched ahead arrive too late."""
    used = given.grown("memd_prefetched_pages_total", outcome="used")
    late = given.grown("memd_prefetched_pages_total", outcome="late")
    lookahead = given.settings.get("memory.prefetch.lookahead")
    if used + late < _LEAST_PAGES or late / (used + late) < 0.2 or not isinstance(lookahead, int):
        return
    yield Finding(
        "Copies from the host come too late",
        0.5,
        (
            f"{show.count(late)} of {show.count(used + late)} pages fetched ahead came after their "
            "request had to wait.",
            f"Pages are asked for {lookahead} steps before a request starts.",
        ),
        f"Ask earlier: set the lookahead to {2 * max(1, lookahead)} steps.",
        "memory.prefetch.lookahead",
        str(2 * max(1, lookahead)),
    )


def _failed_copies(given: Facts) -> Iterable[Finding]:
    failed = given.grown("memd_transfer_failures_total")
    if failed:
        yield Finding(
            "Copies between device and host fail",
            0.65,
            (
                f"{show.count(failed)} failed in {show.duration(given.window.seconds)}; what they "
                "carried is computed again.",
            ),
            "Look at the log for the cause: pinned memory, or the device itself.",
            page="tiers",
        )


def _tail(given: Facts) -> Iterable[Finding]:
    """Partly filled last pages take much room: pages are too large for these requests."""
    pool = given.pool
    layout = pool.get("layout") or {}
    held = ((pool.get("active_pages") or 0) + (pool.get("cached_pages") or 0)) * layout.get(
        "page_bytes", 0
    )
    waste = pool.get("tail_waste_bytes") or 0
    if (
        held
        and waste / held > 0.2
        and held > 0.3 * layout.get("page_bytes", 0) * pool.get("capacity_pages", 0)
    ):
        yield Finding(
            "Pages are large for these requests",
            0.3,
            (
                f"{show.size(waste)}, {show.share(waste / held)} of the memory in use, is room in "
                f"last, partly filled pages of {layout.get('page_tokens')} tokens.",
            ),
            "Set memory.page_tokens lower at the next start.",
            page="pool",
        )


def _restarts(given: Facts) -> Iterable[Finding]:
    died = given.grown("memd_engine_restarts_total")
    if died:
        yield Finding(
            "The engine was restarted",
            0.95,
            (f"{show.count(died)} times in {show.duration(given.window.seconds)}.",),
            "Its log says why; open requests were resumed.",
            page="jobs",
        )


RULES: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    _high_mark,
    _waiting,
    _host,
    _marks_near,
    _misses,
    _tenant,
    _leak,
    _quarantine,
    _copies,
    _failed_copies,
    _tail,
    _restarts,
)
