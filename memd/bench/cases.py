"""What offline benchmarks generate, and how one is told from outside what to run next.

Imports nothing but the standard library, so that a peer can run it in an environment of its own.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """So many requests of so many tokens in, of which the first are the same for all, and out."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0

    def prompts(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        """New random prompts."""

        def tokens(count: int) -> list[int]:
            return [rng.randrange(10, vocab_size) for _ in range(count)]

        shared = tokens(self.shared_tokens)
        own = self.prompt_tokens - self.shared_tokens
        return [shared + tokens(own) for _ in range(self.requests)]


CASES = {
    "single": Case(1, 128, 256),
    "batch64": Case(64, 256, 512),
    "batch256": Case(256, 256, 256),
    "long256": Case(256, 1024, 128),
    "prefill256": Case(256, 1024, 1),
    "shared256": Case(256, 4160, 64, shared_tokens=4096),
}


def say(kind: str, **values: object) -> None:
    """A line for whoever drives this process; other lines are not for it."""
    sys.stdout.write(f"@{kind} {json.dumps(values)}\n")
    sys.stdout.flush()


def listen(run: Callable[[Case], float]) -> None:
    """Run the cases named on standard input, a line each; answer each with its seconds."""
    say("ready")
    for line in sys.stdin:
        say("done", seconds=run(CASES[line.strip()]))
