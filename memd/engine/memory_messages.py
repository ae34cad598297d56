"""What the engine says about its elastic memory. Part of `memd.engine.messages`."""

from typing import Any

import msgspec

from memd.types import LimitWait


class EngineEvent(msgspec.Struct, frozen=True):
    """Something that an operator may want to find in the history."""

    kind: str
    message: str
    details: dict[str, Any]


class ElasticSnapshot(msgspec.Struct, frozen=True):
    """The elastic pool at the end of a step. Blocks and pages count since the engine's start."""

    limit_pages: int  # that the settings allow
    max_model_len: int  # that this limit and the model allow, tokens
    target_pages: int  # the same, or less while the device is short of memory
    limit_waits_for: LimitWait | None  # what keeps the pool above its target
    fragmentation_ratio: float
    max_fragmentation_ratio: float  # that runs keep it below
    empty_blocks: int  # with memory, that hold nothing
    defrag_running: bool
    defrag_runs: dict[str, dict[str, int]]  # by reason and outcome: "completed", "failed"
    defrag_moved_pages: int
    defrag_last_run: dict[str, Any] | None  # or the one under way
    defrag_step_seconds: tuple[list[float], list[int], float]  # see `Histogram`
    grown_blocks: dict[str, int]  # by reason: "demand", "ahead"
    shrunk_blocks: dict[str, int]  # by reason: "limit", "pressure", "idle", "admin"
    under_pressure: bool  # others on the device need memory
    device_free_bytes: int | None  # None: not known
