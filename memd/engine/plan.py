"""What a step computes."""

from dataclasses import dataclass, field

from memd.engine.request import Request


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + count) of a request to compute.

    `samples`: the next token can be sampled after this chunk.
    """

    request: Request
    start: int
    count: int
    samples: bool
    stop: int = field(init=False)

    def __post_init__(self) -> None:
        self.stop = self.start + self.count

    @property
    def draws(self) -> bool:
        """Whether the next token is sampled; it is not where no output was asked for."""
        return self.samples and self.request.sampling.max_tokens > 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: sequences with one token to compute, then pieces of longer ones.

    `starved` requests cannot get their pages although nothing else runs: they have to fail.
    """

    decodes: list[Chunk]
    prefills: list[Chunk]
    starved: list[Request] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        return self.decodes + self.prefills

    @property
    def sampled(self) -> list[Chunk]:
        """Chunks after which a token is sampled, in order."""
        return [chunk for chunk in self.chunks if chunk.draws]

    @property
    def needs_results(self) -> bool:
        """Whether the step after this one can only be sampled when this one's tokens are known."""
        return any(chunk.request.needs_history for chunk in self.chunks)

    @property
    def mode(self) -> str:
        """`decode`, `prefill` or `mixed`."""
        if not self.prefills:
            return "decode"
        return "mixed" if self.decodes else "prefill"
