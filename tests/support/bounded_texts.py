"""What holds of texts whatever bounds the pages of their sequences."""

import random
from collections.abc import Callable

from toy import Harness

from memd.engine.messages import Preempt, SamplingParams, Submit

Prompt = Callable[..., list[int]]
Continuation = Callable[[list[int], int], list[int]]


def goes_on_after_preemption(
    harness: Harness, prompt: Prompt, continuation: Continuation, after: int
) -> None:
    """A preempted sequence goes on with the same text."""
    request = harness.submit(prompt(150), 200)
    while len(harness.tokens(request)) < after:
        harness.step()
    assert harness.ask(Preempt(1, request)).error is None
    harness.finish()
    assert harness.tokens(request) == continuation(prompt(150), 200)
    harness.assert_idle()


def many_in_little_memory(harness: Harness, prompt: Prompt, continuation: Continuation) -> None:
    """They preempt each other, and each still gets its text."""
    chance = random.Random(4)
    prompts = [prompt(chance.choice([3, 40, 90, 300]), seed) for seed in range(14)]
    prompts[3:5] = [prompts[2] + [seed] for seed in range(2)]
    requests = [harness.submit(each, 150) for each in prompts]
    harness.finish()
    for request, each in zip(requests, prompts, strict=True):
        assert harness.tokens(request) == continuation(each, 150)
    assert harness.engine.snapshot().preemptions > 0
    harness.assert_idle()


def goes_on_after_an_engines_death(
    harness: Harness, prompt: Prompt, continuation: Continuation, done: int
) -> None:
    """A text of which some is there already ends as it would have."""
    whole = continuation(prompt(90), 200)
    sampling = SamplingParams(seed=1, max_tokens=200, temperature=0.0)
    harness.send(Submit("again", prompt(90), sampling, output_tokens=whole[:done]))
    harness.finish()
    assert whole[:done] + harness.tokens("again") == whole
    harness.assert_idle()
