"""A sequence inside the engine: what it wants, what it has, and where it stands."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from memd.engine.messages import PinWish, SamplingParams, SequenceUsage, Submit, TokenLogprobs
from memd.engine.shares import Account
from memd.pool.sequence import PoolSequence
from memd.types import PrefixMiss, RequestId, StallCause, Tier


@dataclass(slots=True, eq=False)
class Request:
    """One sequence from submission to its last output.

    A step closes part of the gap between `num_computed` and `length`; that one rule covers
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
    account: Account  # whose share of the engine it uses
    arrival: int  # position in the order of arrival
    submitted_at: float
    sequence: PoolSequence | None = None
    slot: int | None = None  # its row in the batch state on the device, while it runs
    num_computed: int = 0  # tokens whose KV is in the pages, or will be after the steps launched
    packed_tokens: int = 0  # length up to which all is packed that is due
    in_flight: int = 0  # tokens sampled by steps launched whose results are not there yet
    reserved_tokens: int = 0  # length up to which room was kept for it when it started
    cached_tokens: int | None = None  # at first admission
    missed: PrefixMiss | None = None  # likewise
    queue_seconds: float | None = None  # until first admission
    restored_tokens: Mapping[Tier, int] = field(default_factory=dict)  # of those: brought up
    restore_until: float | None = None  # when waiting for pages on their way ends
    preemptions: int = 0
    peak_pages: int = 0  # held, before its latest preemption
    stall_seconds: float = 0.0  # in stalls that have ended
    stall: tuple[StallCause, float] | None = None  # what memory it waits for, and since when
    reported: bool = False  # an Output has been sent
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    needs_history: bool = False  # its sampling's; looked at for every token
    pin: PinWish | None = None  # still to be done
    pinned_tokens: int = 0
    max_length: int = 0  # prompt plus the longest output asked for
    end_token_ids: frozenset[int] = frozenset()
    ended: bool = False  # the engine knows it no more

    @classmethod
    def from_message(
        cls,
        message: Submit,
        namespace: str,
        arrival: int,
        now: float,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> "Request":
        sampling = message.sampling
        ends = frozenset(sampling.stop_token_ids)
        return cls(
            id=RequestId(message.request_id),
            prompt_length=len(message.prompt_tokens),
            tokens=array("i", message.prompt_tokens + message.output_tokens),
            sampling=sampling,
            namespace=namespace,
            priority=message.priority,
            tenant=message.tenant,
            account=(message.tenant, "" if message.tenant else message.salt),
            arrival=arrival,
            submitted_at=now,
            pin=message.pin,
            needs_history=sampling.needs_history,
            max_length=len(message.prompt_tokens) + sampling.max_tokens,
            end_token_ids=ends if sampling.ignore_eos else ends | eos_token_ids,
        )

    @property
    def usage(self) -> SequenceUsage:
        """What it has cost so far."""
        held = 0
        if self.sequence is not None:
            held = max(len(self.sequence.pages), self.sequence.most_pages)
        return SequenceUsage(max(held, self.peak_pages), self.preemptions, self.stall_seconds)

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: priority, then arrival."""
        return (self.priority, self.arrival)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def length(self) -> int:
        """Tokens, with those in flight."""
        return len(self.tokens) + self.in_flight

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next is sampled; 0: the last one wanted is in flight."""
        length = len(self.tokens) + self.in_flight
        if self.in_flight and length >= self.max_length:
            return 0
        return length - self.num_computed
