"""What the engine counts."""

from dataclasses import dataclass, field

from memd.engine.stalls import Stalls
from memd.histogram import LATENCY, STEP, HistogramCounts
from memd.types import FinishReason


@dataclass(slots=True)
class EngineCounters:
    """Running totals since the start."""

    steps: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0, "mixed": 0})
    replayed_steps: dict[str, int] = field(  # of those: all of it from graphs
        default_factory=lambda: {"prefill": 0, "decode": 0, "mixed": 0}
    )
    shared_prefix_steps: int = 0  # of those: a prefix was read once for several sequences
    step_seconds: dict[str, HistogramCounts] = field(
        default_factory=lambda: {
            mode: HistogramCounts(STEP) for mode in ("prefill", "decode", "mixed")
        }
    )
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )
    generated_tokens: int = 0
    nan_logits: int = 0
    wait_seconds: float = 0.0  # for the device: not what the host has to do itself


@dataclass(slots=True)
class SchedulerCounters:
    """Running totals since the start."""

    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0  # looked up at first admission
    cached_tokens: dict[str, int] = field(
        default_factory=lambda: {"device": 0, "host": 0, "disk": 0}
    )
    queue_seconds: HistogramCounts = field(default_factory=lambda: HistogramCounts(LATENCY))
    stalls: Stalls = field(default_factory=Stalls)
