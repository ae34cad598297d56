"""What the engine counts."""

from dataclasses import dataclass, field

from memd.histogram import STEP, HistogramCounts
from memd.types import FinishReason


@dataclass(slots=True)
class EngineCounters:
    """Running totals since the start."""

    steps: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0, "mixed": 0})
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
