"""A sliding window with sinks through the whole engine: text, memory, sharing, resumption.

The toy model's next token is a hash of all that the window and the sinks show it.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import toy
from bounded_texts import (
    goes_on_after_an_engines_death,
    goes_on_after_preemption,
    many_in_little_memory,
)
from paces import both_paces  # noqa: F401
from toy import Harness, ToyModel, logits_after, next_token

from memd.models.decoder import ForwardBatch

PAGE = 16


@dataclass
class WindowedToy(ToyModel):
    """Sees the first `sinks` tokens and the last `window`, wherever in the pages they are."""

    window: int = 32
    sinks: int = 4

    def forward(self, batch: ForwardBatch, kv: torch.Tensor, packed: None = None) -> torch.Tensor:
        pages = kv.flatten(0, 1)[:, 0, 0, 0, :, 0]  # [pages, page_tokens]
        pages[batch.write_pages, batch.write_offsets] = batch.token_ids.float()
        self.computed_tokens += len(batch.token_ids)
        decodes = batch.num_decodes
        starts = [*range(decodes), *batch.query_starts.tolist()]
        rows = []
        for row in batch.logits_rows.tolist():
            of = row
            if row >= decodes:
                of = max(at for at, start in enumerate(starts[:-1]) if start <= row)
            after = 0 if row < decodes else starts[of + 1] - 1 - row
            length = int(batch.kv_lens[of]) - after
            stored = pages[batch.page_table[of]].flatten()[:length].tolist()
            rows.append(logits_after(seen(list(map(int, stored)), self.window, self.sinks)))
        return torch.stack(rows) if rows else torch.empty(0, toy.VOCAB)


def seen(tokens: list[int], window: int, sinks: int) -> list[int]:
    return tokens[:sinks] + tokens[max(sinks, len(tokens) - window) :]


def continuation(prompt: list[int], count: int, window: int = 32, sinks: int = 4) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(seen(tokens, window, sinks)))
    return tokens[len(prompt) :]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(toy.VOCAB - 1), k=length)


def make(*settings: str, window: int = 32, sinks: int = 4) -> Harness:
    spans = f"kv.window={window}", f"kv.sinks={sinks}"
    return Harness(*spans, *settings, model=WindowedToy(window=window, sinks=sinks))


@pytest.mark.parametrize(("window", "sinks"), [(32, 4), (32, 0), (1, 1), (17, 40)])
@pytest.mark.parametrize("length", [1, 32, 33, 200])
def test_text_is_that_of_window_and_sinks(window: int, sinks: int, length: int) -> None:
    harness = make(window=window, sinks=sinks)
    expected = continuation(prompt(length), 120, window, sinks)
    assert harness.generate(prompt(length), 120) == expected
    assert harness.engine.snapshot().pool.dropped_pages["recency"] > 0
    harness.assert_idle()


@pytest.mark.parametrize("chunk", [16, 512])
def test_memory_is_constant_and_lengths_pass_model_and_pool(chunk: int) -> None:
    """The toy model ends at 4,096 tokens, the pool at 512."""
    harness = make(
        "model.max_len=20000", "memory.limit=512 tokens", f"engine.max_batch_tokens={chunk}"
    )
    assert harness.ready.max_model_len == 20000
    pool = harness.engine.pool
    request = harness.submit(prompt(4000), 300)
    most = 0
    while not harness.outputs.get(request) or harness.end_of(request) is None:
        harness.step()
        most = max(most, pool.pages.active)
        sequence = pool.sequences.get(request)  # type: ignore[call-overload]
        if sequence is not None and len(sequence.tokens) > 4000 + PAGE:
            assert len(sequence.pages) <= -(-4 // PAGE) + 32 // PAGE + 1
    assert harness.tokens(request) == continuation(prompt(4000), 300)
    assert most <= pool.retention.peak_pages(10**6) < 12
    usage = harness.end(request).usage
    assert usage is not None
    assert usage.peak_pages == most
    dropped = harness.engine.snapshot().pool.dropped_pages
    assert dropped == {"recency": (4300 - 32) // PAGE - 1, "attention_share": 0}
    harness.assert_idle()


def test_without_a_window_the_models_limit_stays() -> None:
    assert Harness("model.max_len=20000", "memory.limit=9000 tokens").ready.max_model_len == 4096
    assert make("memory.limit=9000 tokens").ready.max_model_len == 4096
    long = make("model.max_len=20000", "memory.limit=64 tokens")  # less than the window needs
    assert long.ready.max_model_len == 64
    # Distances within a window wider than the model's length would be new to the model.
    wide = make("model.max_len=20000", "memory.limit=20000 tokens", window=4093)
    assert wide.ready.max_model_len == 4096


def test_the_beginning_is_shared_and_stays_shared() -> None:
    harness = make()
    shared = harness.engine.pool.retention.shared_pages() * PAGE
    text = prompt(400)
    first = harness.submit(text, 40)
    harness.finish()
    second = harness.submit(text, 40)
    third = harness.submit([*text[:40], 1, 2, 3], 40)
    harness.finish()
    assert harness.cached(first) == 0
    assert shared <= harness.cached(second) < shared + PAGE
    assert harness.cached(third) >= 32
    assert harness.tokens(second) == harness.tokens(first) == continuation(text, 40)
    assert harness.tokens(third) == continuation([*text[:40], 1, 2, 3], 40)
    harness.assert_idle()


def test_requests_that_come_together_compute_the_shared_part_once() -> None:
    harness = make()
    before = harness.model.computed_tokens
    for tail in range(4):
        harness.submit([*prompt(300), tail], 4)
    harness.finish()
    shared = harness.engine.pool.retention.shared_pages() * PAGE
    assert harness.model.computed_tokens - before <= 4 * (301 - shared + 4) + shared + PAGE
    harness.assert_idle()


@pytest.mark.parametrize("preempt_after", [3, 40, 90])
def test_a_preempted_sequence_goes_on_with_the_same_text(preempt_after: int) -> None:
    goes_on_after_preemption(make(), prompt, continuation, preempt_after)


def test_many_sequences_in_little_memory() -> None:
    """They preempt each other, and each still gets its text."""
    harness = make("memory.limit=384 tokens", "model.max_len=2000", "memory.host.limit=1MB")
    many_in_little_memory(harness, prompt, continuation)


@pytest.mark.parametrize("done", [1, 100, 199])
def test_after_an_engine_died_the_text_goes_on(done: int) -> None:
    goes_on_after_an_engines_death(make(), prompt, continuation, done)


def test_pages_that_were_dropped_are_counted_and_tokens_add_up() -> None:
    harness = make()
    request = harness.submit(prompt(20), 300)
    while len(harness.tokens(request)) < 250:
        harness.step()
    snapshot = harness.engine.snapshot().pool
    sequence = harness.engine.pool.sequences[request]  # type: ignore[index]
    held = len(sequence.tokens) - sequence.dropped_pages * PAGE
    assert snapshot.active_tokens == held
    assert snapshot.dropped_pages["recency"] == sequence.dropped_pages > 0
    assert snapshot.tail_waste_bytes >= 0
    harness.finish()


def test_what_never_fits_is_refused_with_what_a_window_needs() -> None:
    harness = make("memory.limit=64 tokens", "model.max_len=2000")
    request = harness.submit(prompt(70), 4)
    harness.finish()
    assert harness.end_of(request) == "error"
    assert "needs 5 pages of 16 tokens, the pool holds 4" in str(harness.end(request).error)


def test_prompt_logprobs_of_a_long_prompt() -> None:
    harness = make("memory.limit=512 tokens")
    request = harness.submit(prompt(900), 1, prompt_logprobs=0)
    harness.finish()
    (first, *rest) = harness.outputs[request][0].prompt_logprobs or []
    assert first is None
    text = prompt(900)
    for position in (1, 33, 64, 500, 899):
        logits = logits_after(seen(text[:position], 32, 4)).log_softmax(0)
        found = rest[position - 1]
        assert found is not None
        assert found.logprob == pytest.approx(float(logits[text[position]]), abs=1e-3)
    harness.assert_idle()


def test_the_shared_beginning_outlives_the_engine(tmp_path: Path) -> None:
    on_disk = f"memory.disk.path={tmp_path}"
    harness = make(on_disk)
    shared = harness.engine.pool.retention.shared_pages() * PAGE
    assert harness.generate(prompt(400), 40) == continuation(prompt(400), 40)
    assert len(list(tmp_path.glob("?/*.kv"))) == shared // PAGE
    harness.disk.close()
    harness = make(on_disk)
    request = harness.submit(prompt(400), 60)
    harness.finish()
    assert harness.tokens(request) == continuation(prompt(400), 60)
    assert harness.outputs[request][0].restored_tokens == {"disk": shared}
    harness.assert_idle()
