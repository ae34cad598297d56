"""A sequence inside the engine: what it wants, what it has, and where it stands."""

from array import array
from dataclasses import dataclass, field

from memd.engine.messages import SamplingParams, Submit, TokenLogprobs
from memd.pool.sequence import PoolSequence
from memd.types import RequestId


@dataclass(slots=True, eq=False)
class Request:
    """One sequence from submission to its last output.

    A step closes part of the gap between `num_computed` and `len(tokens)`; that one rule covers
    chunked prefill, prefix hits, decoding and resumed sequences alike. Waiting requests have no
    `sequence` and nothing computed.
    """

    id: RequestId
    prompt_length: int
    tokens: "array[int]"  # prompt, then what was generated
    sampling: SamplingParams
    namespace: str
    priority: int
    tenant: str
    arrival: int  # position in the order of arrival
    submitted_at: float
    sequence: PoolSequence | None = None
    num_computed: int = 0  # tokens whose KV is in the pages
    reserved_tokens: int = 0  # length up to which room was kept for it when it started
    cached_tokens: int | None = None  # at first admission
    queue_seconds: float | None = None  # until first admission
    restored_tokens: int = 0  # of the cached ones: brought up from the host
    restore_until: float | None = None  # when waiting for pages on their way ends
    preemptions: int = 0
    preempted_at: float | None = None
    reported: bool = False  # an Output has been sent
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @classmethod
    def from_message(cls, message: Submit, namespace: str, arrival: int, now: float) -> "Request":
        return cls(
            id=RequestId(message.request_id),
            prompt_length=len(message.prompt_tokens),
            tokens=array("i", message.prompt_tokens + message.output_tokens),
            sampling=message.sampling,
            namespace=namespace,
            priority=message.priority,
            tenant=message.tenant,
            arrival=arrival,
            submitted_at=now,
        )

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: priority, then arrival."""
        return (self.priority, self.arrival)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def num_remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled; at least 1."""
        return len(self.tokens) - self.num_computed

    @property
    def max_length(self) -> int:
        """Prompt plus the longest output asked for."""
        return self.prompt_length + self.sampling.max_tokens
