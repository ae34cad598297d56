"""The messages between the api process and the engine process, and nothing else.

Plain data: msgspec structs, encoded as MessagePack by `memd.engine.port`. Both sides and the tests
build them directly. Times are seconds of the engine's monotonic clock unless a name says otherwise.
"""

from typing import Any, Literal

import msgspec

from memd.engine.snapshot_types import EngineEvent, EngineSnapshot
from memd.faults import FaultPlan
from memd.types import FinishReason, PrefixMiss, PrefixOrder


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one sequence is sampled. Validated by the api; the engine trusts it.

    `seed` is always set: a request without one gets it when accepted, so that a resumed or
    re-batched request continues as it would have.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = (
        None  # alternatives reported for each generated token; 0: the token itself
    )
    prompt_logprobs: int | None = None  # the same for prompt tokens

    @property
    def needs_history(self) -> bool:
        """Whether what is sampled or reported depends on more than the logits and a draw."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
            or self.min_tokens > 0
            or self.logprobs is not None
            or self.prompt_logprobs is not None
        )


# api process -> engine process


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message: load the model and build the pool."""

    settings: dict[str, Any]  # the whole tree, by section, as memd.config.Settings dumps it
    revision: int
    sampling_vocab_size: int  # ids at or above it are never sampled (the tokenizer's size)
    eos_token_ids: list[int]


class PinWish(msgspec.Struct, frozen=True):
    """What a request asks to be kept from eviction: the whole pages of its first tokens."""

    tokens: int
    ttl_seconds: float
    label: str = ""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """One sequence to generate. A request with n choices is n of these."""

    request_id: str
    prompt_tokens: list[int]
    sampling: SamplingParams
    salt: str = ""  # cache isolation: nothing is shared between two salts
    priority: int = 0  # lower first
    tenant: str = ""  # who shares the engine fairly with the others
    output_tokens: list[int] = []  # what it has already: an engine before this one died
    pin: PinWish | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop a sequence wherever it is: the api found a stop string, or nobody wants it any more."""

    request_id: str
    reason: Literal["stop", "abort"] = "abort"


class ApplySettings(msgspec.Struct, frozen=True, tag=True):
    """Put live settings in force between two steps; answered by a Reply."""

    command_id: int
    revision: int
    values: dict[str, Any]  # dotted key -> value in base units


class PoolCommand(msgspec.Struct, frozen=True, tag=True):
    """An operator's action on the pool; answered by a Reply.

    `reclaim` evicts `pages` cached pages (None: down to the low mark), `flush` evicts every cached
    page, `audit` recounts everything and repairs leaks, `defrag` has a run of defragmentation begin
    (`idle`: memd itself asks for it).
    """

    command_id: int
    action: Literal["reclaim", "flush", "audit", "defrag"]
    pages: int | None = None
    idle: bool = False


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Ask for a listing too large for the snapshot; answered by a Reply.

    `sort`, `tenant` and `pinned` are for prefixes only, `shares` for requests: with what share of
    attention each of their pages has.
    """

    command_id: int
    what: Literal["blocks", "prefixes", "requests"]
    offset: int = 0
    limit: int = 1000
    sort: PrefixOrder = "tokens"
    tenant: str | None = None
    pinned: bool | None = None
    shares: bool = False


class PrefixCommand(msgspec.Struct, frozen=True, tag=True):
    """Pin, unpin or evict the prefix that a listing or an explanation named; answered by a Reply.

    `ttl_seconds`: of a pin; None: until it is taken back.
    """

    command_id: int
    action: Literal["pin", "unpin", "evict"]
    prefix_id: str
    ttl_seconds: float | None = None


class Explain(msgspec.Struct, frozen=True, tag=True):
    """Ask what a prompt would find now, and why no more; answered by a Reply."""

    command_id: int
    tokens: list[int]
    salt: str = ""


class Preempt(msgspec.Struct, frozen=True, tag=True):
    """Publish and release a running sequence's pages and queue it again; answered by a Reply."""

    command_id: int
    request_id: str


class SetPriority(msgspec.Struct, frozen=True, tag=True):
    """Move a sequence to another place in the order, running or waiting; answered by a Reply."""

    command_id: int
    request_id: str
    priority: int


class ArmFaults(msgspec.Struct, frozen=True, tag=True):
    """Put another fault plan in force, if there is one, and tell what has come of the faults so
    far; answered by a Reply.
    """

    command_id: int
    plan: FaultPlan | None = None


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the engine process after the messages before it."""


ToEngine = (
    Start
    | Submit
    | Abort
    | ApplySettings
    | PoolCommand
    | PrefixCommand
    | Describe
    | Explain
    | Preempt
    | SetPriority
    | ArmFaults
    | Shutdown
)

# engine process -> api process


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities at one position, from the model's unmodified distribution."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), best first; as many as were asked for


class SequenceUsage(msgspec.Struct, frozen=True, array_like=True):
    """What a sequence has cost, from its submission to its end."""

    peak_pages: int
    preemptions: int
    stall_seconds: float  # waits for memory


class Output(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What one step produced for one sequence.

    The last Output of a sequence carries `finish_reason`; exactly one does. `cached_tokens`,
    `queue_seconds` and `prompt_logprobs` come with the first, `usage` with the last.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # one for each of token_ids
    prompt_logprobs: list[TokenLogprobs | None] | None = (
        None  # one for each prompt token, first None
    )
    cached_tokens: int | None = None
    restored_tokens: dict[str, int] | None = None  # of those: brought up, by tier
    pinned_tokens: int | None = None  # of the prompt: kept from eviction, as was asked for
    queue_seconds: float | None = None
    missed: PrefixMiss | None = None  # of the prompt; with the first
    finish_reason: FinishReason | None = None
    error: str | None = None  # neutral message, with finish_reason "error"
    error_code: str | None = None  # machine-readable, e.g. "context_length_exceeded"
    usage: SequenceUsage | None = None


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of the start: `stage` in words, `progress` 0 to 1 within the stage."""

    stage: str
    progress: float


class Working(msgspec.Struct, frozen=True, tag=True):
    """A long step is under way and goes on."""


class GpuFacts(msgspec.Struct, frozen=True):
    """The engine's GPU, and what is taken there for good."""

    uuid: str  # as the driver writes it, without a prefix
    weights_bytes: int
    graphs_bytes: int
    pool_in_allocator: bool  # the pool's memory is part of what torch's allocator has taken


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine has loaded, warmed up and serves."""

    pid: int
    max_model_len: int  # fitted: what the model, the setting and the pool allow together
    model: dict[str, Any]  # architecture, dtype, parameters, layers, … for the operator
    launch_table: str | None  # "user", "shipped" or "default" launches; None: no Triton kernels
    pool: dict[str, Any]  # page_tokens, page_bytes, block_bytes, pages_per_block, capacity_pages, …
    gpu: GpuFacts | None = None  # None: the engine is on the CPU


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine ends: it cannot start, or its own state is broken."""

    message: str


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Answer to the command of the same id: a result, or an error in words."""

    command_id: int
    result: dict[str, Any] | None = None
    error: str | None = None


class StepReport(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The one message of the engine for each step."""

    outputs: list[Output] = []
    replies: list[Reply] = []
    snapshot: EngineSnapshot | None = None
    events: list[EngineEvent] = []


FromEngine = Loading | Working | Ready | Failed | StepReport
