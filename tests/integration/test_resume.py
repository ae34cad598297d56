"""A sequence that comes with output from an engine that died goes on as if nothing had happened."""

import random

import pytest
import toy
from paces import both_paces  # noqa: F401
from toy import Harness, continuation

from memd.engine.messages import SamplingParams, Submit

OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.3, "top_p": 0.95},
    "penalties": {"temperature": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "minimum": {"temperature": 1.0, "min_tokens": 30, "stop_token_ids": [3, 4, 5, 6]},
}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(toy.VOCAB - 1), k=length)


def resume(harness: Harness, sampling: SamplingParams, output: list[int]) -> list[int]:
    """Everything the sequence has in the end."""
    harness.send(Submit("again", prompt(20), sampling, output_tokens=output))
    harness.finish()
    return output + harness.tokens("again")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nothing_changes_wherever_it_is_resumed(options: dict[str, object]) -> None:
    sampling = SamplingParams(seed=7, max_tokens=40, **options)  # type: ignore[arg-type]
    alone = resume(Harness(), sampling, [])
    for length in {1, 15, len(alone) // 2, len(alone) - 1}:
        harness = Harness()
        assert resume(harness, sampling, alone[:length]) == alone
        assert harness.end("again").finish_reason in ("length", "stop")
        harness.assert_idle()


def test_what_is_resumed_counts_from_the_end_of_the_prompt() -> None:
    harness = Harness("model.max_len=60")
    sampling = SamplingParams(seed=1, max_tokens=40, temperature=0.0)
    assert resume(harness, sampling, continuation(prompt(20), 39)) == continuation(prompt(20), 40)


@pytest.mark.parametrize(
    ("output", "reason"), [([1, 2, 8, 9], "length"), ([1, toy.EOS], "stop"), ([1, 3], "stop")]
)
def test_one_that_was_complete_only_ends(output: list[int], reason: str) -> None:
    harness = Harness()
    warm_up = harness.model.computed_tokens
    sampling = SamplingParams(seed=1, max_tokens=4, stop_token_ids=[3])
    assert resume(harness, sampling, output) == output
    assert harness.end("again").finish_reason == reason
    assert harness.model.computed_tokens == warm_up
    harness.assert_idle()


def test_what_is_resumed_counts_as_recomputed_and_not_as_prompt() -> None:
    """Its prompt was looked up and counted by the engine that had it first."""
    harness = Harness()
    sampling = SamplingParams(seed=1, max_tokens=40, temperature=0.0)
    resume(harness, sampling, continuation(prompt(20), 10))
    snapshot = harness.engine.snapshot()
    assert sum(snapshot.prompt_tokens.values()) == 0
    assert snapshot.pool.prefix_query_tokens == 0
    assert snapshot.recomputed_tokens == 29
    assert snapshot.generated_tokens == 30
