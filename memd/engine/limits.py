"""Budgets of the engine; live, changed between steps only."""

from dataclasses import dataclass


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
