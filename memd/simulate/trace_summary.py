"""What a trace holds, in a few figures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memd.simulate.trace import TraceHeader, TraceRequest

QUANTILES = (0.1, 0.5, 0.9, 0.99)


def summarise(header: TraceHeader, requests: Iterable[TraceRequest]) -> dict[str, Any]:
    """Figures of a trace; None: not known.

    `infinite_cache_hit_share`: of the prompt tokens, those in whole pages that an earlier sequence
    of the namespace had filled, as if each had ended before the next one came; the last token of a
    prompt is always computed. `reuse_distance_pages`: quantiles of the number of different pages
    that were used between two uses of a page, which is what an LRU cache must hold to find it
    (stack distance, Mattson et al. 1970); `_bytes` is the same in memory.
    """
    taken = _Figures(header.pool.page_tokens)
    for request in requests:
        taken.add(request)
    distances = _quantiles(taken.reuse.distances)
    page_bytes = header.pool.page_bytes
    span = taken.last_arrival - taken.first_arrival if taken.sequences else None
    return {
        "id": header.id,
        "model": header.model.get("name"),
        "started_at": header.started_at,
        "ended_at": header.ended_at,
        "requests": len(taken.requests),
        "sequences": taken.sequences,
        "dropped": header.dropped,
        "namespaces": len(taken.namespaces),
        "tenants": len(taken.tenants),
        "outcomes": dict(sorted(taken.outcomes.items())),
        "span_seconds": span,
        "arrivals_per_second": (len(taken.requests) - 1) / span if span else None,
        "prompt_tokens": _quantiles(taken.prompts),
        "output_tokens": _quantiles(taken.outputs),
        "prompt_tokens_total": sum(taken.prompts),
        "output_tokens_total": sum(taken.outputs),
        "cached_share": (taken.cached_tokens / taken.told_tokens if taken.told_tokens else None),
        "infinite_cache_hit_share": (
            taken.hit_tokens / sum(taken.prompts) if taken.prompts else None
        ),
        "different_pages": taken.reuse.different,
        "different_pages_bytes": taken.reuse.different * page_bytes,
        "reuse_distance_pages": distances,
        "reuse_distance_bytes": {
            name: None if pages is None else pages * page_bytes for name, pages in distances.items()
        },
    }


class ReuseDistances:
    """How many different pages are used between two uses of the same page.

    A use costs O(log n) of all uses: a Fenwick tree counts the pages whose last use is later.

    Attributes:
        distances: Of the uses that count and were not the first of their page.
    """

    def __init__(self) -> None:
        self.distances: list[int] = []
        self._last: dict[str, int] = {}
        self._tree = [0]  # 1-based; a 1 at each page's last use
        self._uses = 0

    @property
    def different(self) -> int:
        """Pages used so far."""
        return len(self._last)

    def known(self, pages: Sequence[str]) -> int:
        """How many of these, from the first on, have been used before."""
        return next((at for at, page in enumerate(pages) if page not in self._last), len(pages))

    def use(self, page: str, counts: bool) -> None:
        """Use a page; its distance is kept if it counts."""
        last = self._last.get(page)
        if last is not None:
            if counts:
                self.distances.append(len(self._last) - self._sum(last))
            self._add(last, -1)
        self._uses += 1
        self._append()
        self._add(self._uses, 1)
        self._last[page] = self._uses

    def _append(self) -> None:
        """Make room for one use: the node's own range, summed from the nodes below it."""
        total, child = 0, self._uses - 1
        stop = self._uses - (self._uses & -self._uses)
        while child > stop:
            total += self._tree[child]
            child -= child & -child
        self._tree.append(total)

    def _add(self, at: int, change: int) -> None:
        while at < len(self._tree):
            self._tree[at] += change
            at += at & -at

    def _sum(self, at: int) -> int:
        total = 0
        while at > 0:
            total += self._tree[at]
            at -= at & -at
        return total


@dataclass
class _Figures:
    """What is added up over the sequences of a trace."""

    page_tokens: int
    sequences: int = 0
    requests: set[str] = field(default_factory=set)
    namespaces: set[str] = field(default_factory=set)
    tenants: set[str] = field(default_factory=set)
    outcomes: dict[str, int] = field(default_factory=dict)
    prompts: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    first_arrival: float = 0.0
    last_arrival: float = 0.0
    cached_tokens: int = 0
    told_tokens: int = 0  # of prompts whose cached tokens are known
    hit_tokens: int = 0
    reuse: ReuseDistances = field(default_factory=ReuseDistances)

    def add(self, request: TraceRequest) -> None:
        """Add one sequence."""
        if not self.sequences:
            self.first_arrival = request.arrival_seconds
        self.last_arrival = request.arrival_seconds
        self.sequences += 1
        self.requests.add(request.request)
        self.namespaces.add(request.namespace)
        if request.tenant:
            self.tenants.add(request.tenant)
        self.outcomes[request.outcome] = self.outcomes.get(request.outcome, 0) + 1
        self.prompts.append(request.prompt_tokens)
        self.outputs.append(request.output_tokens)
        if request.cached_tokens is not None:
            self.cached_tokens += request.cached_tokens
            self.told_tokens += request.prompt_tokens
        in_prompt = request.prompt_tokens // self.page_tokens
        known = self.reuse.known(request.pages[:in_prompt])
        self.hit_tokens += min(known * self.page_tokens, request.prompt_tokens - 1)
        for at, page in enumerate(request.pages):
            self.reuse.use(page, counts=at < in_prompt)


def _quantiles(values: list[int]) -> dict[str, int | None]:
    """Nearest-rank quantiles, and the extremes."""
    ordered = sorted(values)
    last = len(ordered) - 1
    found: dict[str, int | None] = {"least": ordered[0] if ordered else None}
    for share in QUANTILES:
        rank = min(last, int(share * len(ordered)))
        found[f"p{round(100 * share)}"] = ordered[rank] if ordered else None
    found["most"] = ordered[-1] if ordered else None
    return found
