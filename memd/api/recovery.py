"""How open sequences outlive the engine: what each one has, and who may have killed the engine.

No port and no clock: the engine client asks, and sends what it is told. Runs on the event loop.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from memd.engine.messages import Output, Ready, Submit
from memd.engine.snapshot_types import EngineSnapshot
from memd.types import FinishReason

SUSPECT_DEATHS = 2
MAX_DEATHS = 3
RestartReason = Literal["killed", "crashed", "hung"]


@dataclass
class Life:
    """What one engine process has told so far.

    Args:
        started: It has been told to load.
        signs: Of progress: grows as long as it lives and goes on.
        steps: Done, as its latest snapshot says.
        ready_at: Monotonic seconds.
        last_words: Why it ends.
    """

    started: bool = False
    signs: int = 0
    steps: int = 0
    ready: Ready | None = None
    ready_at: float = 0.0
    last_words: str | None = None


def with_limit(ready: Ready | None, snapshot: EngineSnapshot | None) -> Ready | None:
    """What an engine said when it was ready, with the limit of the pool that is in force now."""
    if ready is None or snapshot is None:
        return ready
    pages, longest = snapshot.elastic.limit_pages, snapshot.elastic.max_model_len
    if (pages, longest) == (ready.pool["capacity_pages"], ready.max_model_len):
        return ready
    pool = {**ready.pool, "capacity_pages": pages}
    return msgspec.structs.replace(ready, pool=pool, max_model_len=longest)


@dataclass(eq=False)
class OpenSequence:
    """One sequence under way.

    Args:
        submit: As accepted.
        deliver: Takes its outputs, for the client.
        deaths: Of engines in a row that had it and gave it no token since the death before.
    """

    submit: Submit
    deliver: Callable[[Output], None]
    opened_at: float  # monotonic
    token_ids: list[int] = field(default_factory=list)
    first_token_at: float | None = None  # monotonic
    reported: bool = False  # its first output has been delivered
    cached_tokens: int | None = None  # as first told
    handed_over: bool = False  # the living engine has it
    deaths: int = 0
    _tokens_at_death: int = -1

    @property
    def suspect(self) -> bool:
        """Whether it may be what kills the engine."""
        return self.deaths >= SUSPECT_DEATHS

    @property
    def gained(self) -> bool:
        """Whether it has a token more than at the last death, which clears it."""
        return len(self.token_ids) > self._tokens_at_death

    def set_priority(self, priority: int) -> None:
        """What every engine from now on is told."""
        self.submit = msgspec.structs.replace(self.submit, priority=priority)

    def hand_over(self) -> Submit:
        """What the living engine needs to go on where the one before ended."""
        self.handed_over = True
        sampling = self.submit.sampling
        if self.reported and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            self.submit, sampling=sampling, output_tokens=list(self.token_ids)
        )

    def take(self, output: Output) -> None:
        """Account an output and deliver it. What comes with the first one is delivered once."""
        self.token_ids += output.token_ids
        if self.reported and output.cached_tokens is not None:
            output = msgspec.structs.replace(
                output, cached_tokens=None, queue_seconds=None, prompt_logprobs=None, missed=None
            )
        elif not self.reported:
            self.cached_tokens = output.cached_tokens
        self.reported = True
        self.deliver(output)

    def lose_engine(self) -> None:
        """The engine died; counts if it had this sequence."""
        if self.handed_over:
            self.deaths = 1 if self.gained else self.deaths + 1
            self._tokens_at_death = len(self.token_ids)
        self.handed_over = False

    def acquit(self) -> None:
        """It cannot be tried now: the next death alone will not end it."""
        self.deaths = SUSPECT_DEATHS - 1


class SequenceWatcher(Protocol):
    """Is told of each sequence, on the event loop."""

    def opening(self) -> None:
        """Sequences are about to be opened."""

    def closed(self, sequence: OpenSequence, outcome: FinishReason) -> None:
        """A sequence has ended, and has all the tokens that it will have. Once for each."""


class Trial:
    """Finds the sequence that kills the engine: suspects are handed over alone, one by one.

    So a death counts against one of them only, and those that were merely there are cleared by
    their next token. They come before all others, in whose queue they would wait and prove nothing.

    Args:
        suspects: In order of arrival.
    """

    def __init__(self, suspects: Iterable[OpenSequence] = ()) -> None:
        self._waiting = deque(suspects)
        self._tried: OpenSequence | None = None

    @property
    def over(self) -> bool:
        """Whether every suspect has been cleared or has ended."""
        return self._tried is None and not self._waiting

    def next(self, open_sequences: dict[str, OpenSequence], blocked: bool) -> OpenSequence | None:
        """The suspect to hand over now, once the one before is cleared.

        Args:
            open_sequences: By id; others have ended.
            blocked: Something waits in the engine for its turn. That is the suspect, which came
                last: there is no room to try more, until some of those before it have finished.
        """

        def is_open(sequence: OpenSequence) -> bool:
            return open_sequences.get(sequence.submit.request_id) is sequence

        tried = self._tried
        if tried is not None and is_open(tried) and not tried.gained:
            if not blocked:
                return None
            for sequence in (tried, *self._waiting):
                sequence.acquit()
            self._waiting.clear()
        self._tried = None
        while self._waiting and self._tried is None:
            candidate = self._waiting.popleft()
            if is_open(candidate):
                self._tried = candidate
        return self._tried
