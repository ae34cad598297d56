"""What a load generator sends and when: arrivals, prompts, conversations. The same for a seed.

Lengths are in words of one syllable or two, which are about a token each; the server's usage tells
the true count.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Mix = Literal["chat", "prefix", "random"]

_COMMON = (
    "the of and to in is that for it was on as with be by at this from or an are but not have "
    "one had all were they we there can who been their has will more if no out so said what up "
    "its about into than them only some could time these two may then do first any my now such "
    "like our over man me even most made after also did many before must through years where "
    "much way well down should because each just those people how too little state good very "
    "make world still own see men work long get here between both life being under never day "
    "same another know while last might us great old year off come since against go came right"
)
WORDS = _COMMON.split()
SHARED_SHARE = 0.75  # of a prompt of the prefix mix
PREFIXES = 4


@dataclass(frozen=True)
class Shape:
    """What a run asks for.

    Args:
        mix: `random` prompts share nothing; `prefix` ones begin with one of a few texts; `chat`
            goes on for several turns.
        requests: How many in all, turns counted.
        rate: Requests a second; infinity: all at once.
        burst: Requests that arrive together.
        duration_seconds: Arrivals end then; None: when all requests are sent.
        prompt_tokens: Mean length of a prompt, of a turn's new text in a chat.
        output_tokens: Mean length of an output.
        spread: Lengths lie between 1 - spread and 1 + spread of the mean.
        turns: Of a conversation.
        think_seconds: Mean pause before a conversation goes on.
        seed: Of everything.
    """

    mix: Mix
    requests: int
    rate: float
    burst: int
    duration_seconds: float | None
    prompt_tokens: int
    output_tokens: int
    spread: float
    turns: int
    think_seconds: float
    seed: int


@dataclass
class Turn:
    """One request. `after_seconds` is the pause after the answer before it."""

    text: str
    max_tokens: int
    after_seconds: float


@dataclass
class Session:
    """Requests that follow one another; all but chats have one."""

    at_seconds: float  # when it arrives, from the start of the run
    turns: list[Turn] = field(default_factory=list)


def sessions(shape: Shape) -> Iterator[Session]:
    """The run's sessions in order of arrival: a Poisson process of bursts."""
    arrivals, texts = random.Random(f"arrivals {shape.seed}"), random.Random(f"text {shape.seed}")
    turns = shape.turns if shape.mix == "chat" else 1
    shared = [_words(texts, round(shape.prompt_tokens * SHARED_SHARE)) for _ in range(PREFIXES)]
    at, left = 0.0, shape.requests
    while left > 0:
        for _ in range(shape.burst):
            count = min(turns, left)
            if count == 0:
                return
            left -= count
            yield Session(at, [_turn(shape, texts, shared) for _ in range(count)])
        at += arrivals.expovariate(shape.rate / turns / shape.burst)
        if shape.duration_seconds is not None and at > shape.duration_seconds:
            return


def body_of(shape: Shape, model: str, history: list[dict[str, str]], turn: Turn) -> dict[str, Any]:
    """A streamed request's body, but for what the caller adds."""
    body = {
        "model": model,
        "max_tokens": turn.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if shape.mix == "chat":
        return {**body, "messages": [*history, {"role": "user", "content": turn.text}]}
    return {**body, "prompt": turn.text}


def _turn(shape: Shape, chance: random.Random, shared: list[str]) -> Turn:
    length, output = (
        max(1, round(mean * chance.uniform(1 - shape.spread, 1 + shape.spread)))
        for mean in (shape.prompt_tokens, shape.output_tokens)
    )
    text = _words(chance, length)
    if shape.mix == "prefix":
        prefix = chance.choice(shared)
        own = max(1, length - len(prefix.split()))
        text = f"{prefix} {_words(chance, own)}"
    pause = chance.expovariate(1 / shape.think_seconds) if shape.think_seconds else 0.0
    return Turn(text, output, pause)


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))
