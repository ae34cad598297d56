"""Budgets of the engine; live, changed between steps only. And what can never be served."""

from bisect import bisect_right
from dataclasses import dataclass

from memd.config import Settings
from memd.engine.request import Request
from memd.errors import RequestError
from memd.pool.pool import Pool


@dataclass(slots=True)
class SchedulerLimits:
    """Live limits; changed between steps only."""

    max_batch_tokens: int
    max_sequences: int
    reserve_tokens: int
    reclaim_pages_per_step: int
    prefetch_window: int  # steps
    prefetch_lookahead: int  # steps
    prefetch_timeout_seconds: float


def scheduler_limits(settings: Settings, automatic: dict[str, int]) -> SchedulerLimits:
    """The budgets that settings ask for; `automatic` by setting."""
    batch_tokens = settings.engine.max_batch_tokens
    reclaim = settings.memory.reclaim_pages_per_step
    return SchedulerLimits(
        max_batch_tokens=(
            automatic["engine.max_batch_tokens"] if batch_tokens == "auto" else batch_tokens
        ),
        max_sequences=settings.engine.max_sequences,
        reserve_tokens=settings.engine.reserve_tokens,
        reclaim_pages_per_step=(
            automatic["memory.reclaim_pages_per_step"] if reclaim == "auto" else reclaim
        ),
        prefetch_window=settings.memory.prefetch.window,
        prefetch_lookahead=settings.memory.prefetch.lookahead,
        prefetch_timeout_seconds=settings.memory.prefetch.timeout,
    )


def longest_request(max_model_len: int, pool: Pool, num_pages: int | None = None) -> int:
    """Most tokens of a request, prompt and output: what the model and the pool's limit allow.

    Args:
        num_pages: Of another limit, in full pages; None: of the pool's own.
    """
    num_pages = pool.configured_pages if num_pages is None else num_pages
    if pool.retention.peak_pages(max_model_len) <= num_pages:
        return max_model_len
    if pool.retention.packed_need is None:
        return num_pages * pool.layout.page_tokens
    lengths, peak_pages = range(max_model_len), pool.retention.peak_pages
    return bisect_right(lengths, num_pages, key=peak_pages) - 1


def check_fits(prompt_length: int, max_tokens: int, max_model_len: int, pool: Pool) -> None:
    """Refuse at once what can never be served.

    Raises:
        RequestError: with the numbers; code `context_length_exceeded`.
    """
    if prompt_length < 1:
        raise RequestError("the prompt has no tokens", "prompt")
    layout = pool.layout
    max_model_len = longest_request(max_model_len, pool)
    limit = f"This model's maximum context length is {max_model_len} tokens"
    needed = pool.retention.peak_pages(prompt_length)
    if needed > pool.configured_pages:
        raise RequestError(
            f"{limit}: the prompt of {prompt_length} tokens needs {needed} pages of "
            f"{layout.page_tokens} tokens, the pool holds {pool.configured_pages}.",
            "prompt",
            "context_length_exceeded",
        )
    if prompt_length + max_tokens > max_model_len:
        raise RequestError(
            f"{limit}, {prompt_length} tokens of prompt and {max_tokens} of output were asked for.",
            "prompt",
            "context_length_exceeded",
        )


def next_tokens(request: Request, pool: Pool) -> int:
    """Most tokens of a running request that one step computes, whatever else is in it."""
    return min(request.num_remaining, pool.retention.chunk_tokens(request.num_computed))
