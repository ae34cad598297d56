"""A budget of pages for each sequence through the whole engine: text, memory, sharing, resumption.

The toy model's next token is a hash of all that its page table shows it.
"""

import random
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

from memd.engine.messages import Describe, Preempt
from memd.errors import SettingsError
from memd.models.decoder import ForwardBatch

PAGE = 16
PAGES = 8  # the budget
SEGMENT = 1  # (8 - 1 of sinks) // 4


class StoredToy(ToyModel):
    """Sees the tokens that its page table holds, and nothing else."""

    def forward(self, batch: ForwardBatch, kv: torch.Tensor, packed: None = None) -> torch.Tensor:
        pages = kv.flatten(0, 1)[:, 0, 0, 0, :, 0]  # [pages, page_tokens]
        pages[batch.write_pages, batch.write_offsets] = batch.token_ids.float()
        self.forwards += 1
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
            rows.append(logits_after(list(map(int, stored))))
        return torch.stack(rows) if rows else torch.empty(0, toy.VOCAB)


def seen(tokens: list[int], pages: int = PAGES, segment: int = SEGMENT) -> list[int]:
    """What the last token sees: the first page, and the latest of segments."""
    beyond = len(tokens) - 1 - pages * PAGE
    if beyond < 0:
        return tokens
    gone = (beyond // (segment * PAGE) + 1) * segment * PAGE
    return tokens[:PAGE] + tokens[PAGE + gone :]


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(seen(tokens)))
    return tokens[len(prompt) :]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(toy.VOCAB - 1), k=length)


def make(*settings: str) -> Harness:
    return Harness("kv.budget=128", *settings, model=StoredToy())


@pytest.mark.parametrize(
    ("length", "count", "chunk"),
    [(1, 150, 16), (127, 20, 512), (128, 20, 512), (129, 20, 40), (400, 40, 512), (400, 40, 16)],
)
def test_text_is_that_of_the_first_page_and_the_latest(length: int, count: int, chunk: int) -> None:
    harness = make(f"engine.max_batch_tokens={chunk}")
    assert harness.generate(prompt(length), count) == continuation(prompt(length), count)
    assert harness.engine.snapshot().pool.dropped_pages["recency"] > 0
    harness.assert_idle()


def test_no_more_than_the_budget_is_ever_held() -> None:
    """In a pool that has no more: the text goes on to the model's length."""
    harness = make("memory.limit=128 tokens")
    assert harness.ready.max_model_len == 4096
    request = harness.submit(prompt(3000), 200)
    most = 0
    while not harness.outputs.get(request) or harness.end_of(request) is None:
        harness.step()
        most = max(most, harness.engine.pool.pages.active)
    assert harness.tokens(request) == continuation(prompt(3000), 200)
    assert most == PAGES
    usage = harness.end(request).usage
    assert usage is not None
    assert usage.peak_pages == PAGES
    harness.assert_idle()


def test_what_fits_the_budget_is_shared_and_kept_whole() -> None:
    harness = make()
    first = harness.submit(prompt(100), 20)
    harness.finish()
    second = harness.submit(prompt(100), 28)
    harness.finish()
    assert harness.cached(first) == 0
    assert harness.cached(second) == 99
    assert harness.engine.snapshot().pool.dropped_pages["recency"] == 0
    expected = toy.continuation(prompt(100), 28)
    assert harness.tokens(second) == expected


def test_what_may_outgrow_it_begins_with_copies_of_what_is_cached() -> None:
    """And leaves what stands before the first page that it let go."""
    harness = make()
    whole = harness.submit(prompt(100), 20)
    harness.finish()
    copies = harness.engine.pool.counters.copies
    longer = harness.submit(prompt(100), 200)
    harness.step(3)
    pool = harness.engine.pool
    sequence = pool.sequences[longer]  # type: ignore[index]
    assert sequence.bounded
    assert pool.pages.shared == 0
    harness.finish()
    assert pool.counters.copies == copies + 6
    assert harness.cached(longer) == 99
    assert harness.tokens(longer) == continuation(prompt(100), 200)
    assert harness.tokens(whole) == harness.tokens(longer)[:20]
    cut = harness.submit(prompt(100), 300)  # ends early: nothing is let go, all stays
    harness.step(20)
    assert harness.ask(Preempt(1, cut)).error is None
    harness.finish()
    assert harness.tokens(cut) == continuation(prompt(100), 300)
    harness.assert_idle()


def test_a_long_prompt_begins_with_what_a_cold_one_computes_before_it_lets_go() -> None:
    harness = make()
    harness.generate(prompt(128), 0, request_id="short")
    request = harness.submit(prompt(128) + prompt(300, 1), 50)
    harness.finish()
    assert 0 < harness.cached(request) <= (PAGES - 1) * PAGE
    assert harness.tokens(request) == continuation(prompt(128) + prompt(300, 1), 50)
    harness.assert_idle()


@pytest.mark.parametrize("preempt_after", [3, 40, 90, 170])
def test_a_preempted_sequence_goes_on_with_the_same_text(preempt_after: int) -> None:
    goes_on_after_preemption(make(), prompt, continuation, preempt_after)


def test_many_sequences_in_little_memory() -> None:
    """They preempt each other, and each still gets its text."""
    harness = make("memory.limit=384 tokens", "memory.host.limit=1MB", "engine.reserve_tokens=8")
    many_in_little_memory(harness, prompt, continuation)


@pytest.mark.parametrize("done", [1, 100, 199])
def test_after_an_engine_died_the_text_goes_on(done: int) -> None:
    goes_on_after_an_engines_death(make(), prompt, continuation, done)


def test_prompt_logprobs_beyond_the_budget() -> None:
    harness = make()
    request = harness.submit(prompt(300), 1, prompt_logprobs=0)
    harness.finish()
    rest = (harness.outputs[request][0].prompt_logprobs or [])[1:]
    text = prompt(300)
    for position in (1, 100, 127, 128, 129, 200, 299):
        logits = logits_after(seen(text[:position])).log_softmax(0)
        found = rest[position - 1]
        assert found is not None
        assert found.logprob == pytest.approx(float(logits[text[position]]), abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("kv.budget=32",), "needs 48 tokens or more"),
        (("kv.budget=128", "kv.sinks=100"), "needs 144 tokens or more"),
        (("kv.budget=128", "kv.window=64"), "cannot be set together with window"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Harness(*settings, model=StoredToy())


class AttentiveToy(StoredToy):
    """Attends to the pages that hold the token 7 a hundred times more than to others."""

    def forward(self, batch: ForwardBatch, kv: torch.Tensor, packed: None = None) -> torch.Tensor:
        logits = super().forward(batch, kv, packed)
        if batch.shares is not None:
            pages = kv.flatten(0, 1)[:, 0, 0, 0, :, 0]
            held = pages[batch.page_table[: batch.num_decodes]]
            at = torch.arange(held.shape[1] * PAGE).view(1, -1, PAGE)
            there = at < batch.kv_lens[: batch.num_decodes, None, None]
            batch.shares.add_(0.01 * there.any(2) + ((held == 7) & there).any(2))
        return logits


def with_sevens(*pages: int) -> list[int]:
    """Seven pages of 8s, with a 7 in some."""
    text = [8] * (7 * PAGE)
    for page in pages:
        text[page * PAGE + 3] = 7
    return text


def test_what_is_attended_to_stays() -> None:
    """Of the pages behind the sinks and before the recent half."""
    harness = Harness("kv.budget=128", "kv.drop_policy=attention_share", model=AttentiveToy())
    request = harness.submit(with_sevens(2, 4), 150)
    while len(harness.tokens(request)) < 140:
        harness.step()
        assert not harness.outputs.get(request) or harness.end_of(request) is None
    sequence = harness.engine.pool.sequences[request]  # type: ignore[index]
    assert len(sequence.pages) <= PAGES
    kv = harness.engine._runner._kv.flatten(0, 1)[:, 0, 0, 0, :, 0]  # type: ignore[attr-defined]
    first = kv[sequence.pages[:3]].long().tolist()
    assert 7 not in first[0]  # the sinks
    assert [page[3] for page in first] == [8, 7, 7]
    assert sequence.shares[1] > 10 * sequence.shares[0]
    assert abs(sum(sequence.shares) - 1) < 0.2
    row = harness.ask(Describe(1, "requests", shares=True)).result["requests"][0]
    assert row["dropped_pages"] == sequence.dropped_pages
    assert row["attention_shares"] == [round(share, 5) for share in sequence.shares]
    assert "attention_shares" not in harness.ask(Describe(2, "requests")).result["requests"][0]
    harness.finish()
    dropped = harness.engine.snapshot().pool.dropped_pages
    assert dropped == {"recency": 0, "attention_share": (7 * PAGE + 150 - 2) // PAGE - PAGES + 1}
    harness.assert_idle()


def test_without_a_share_known_the_oldest_go_first() -> None:
    """So while a prompt is computed; by recency attention does not matter, and is not measured."""
    for policy in ("attention_share", "recency"):
        model = AttentiveToy()
        harness = Harness("kv.budget=128", f"kv.drop_policy={policy}", model=model)
        assert harness.generate(prompt(300), 1) == continuation(prompt(300), 1)
        measured = harness.engine._runner._runner._shares is not None  # type: ignore[attr-defined]
        assert measured == (policy == "attention_share")


def test_where_shares_are_clear_it_does_not_matter_who_else_runs() -> None:
    """Beside others, which share the beginning, come and go, each has the text it has alone."""
    settings = "kv.budget=128", "kv.drop_policy=attention_share"
    chance = random.Random(1)
    begin = prompt(60)
    prompts = [begin + prompt(chance.choice([1, 30, 100, 200]), seed) for seed in range(6)]
    alone = [
        Harness(*settings, model=AttentiveToy()).generate(each, 120 + 9 * index)
        for index, each in enumerate(prompts)
    ]
    harness = Harness(*settings, model=AttentiveToy())
    requests = []
    for index, each in enumerate(prompts):
        requests.append(harness.submit(each, 120 + 9 * index))
        harness.step(8)
    harness.finish()
    for request, expected in zip(requests, alone, strict=True):
        assert harness.tokens(request) == expected
    harness.assert_idle()


@pytest.mark.parametrize("budget", ["128", "192", "null"])
def test_files_serve_whatever_the_next_budget_is(tmp_path: Path, budget: str) -> None:
    """What fitted the budget is on disk whole, of what outgrew it the sinks."""
    on_disk = f"memory.disk.path={tmp_path}"
    harness = make(on_disk)
    harness.generate(prompt(100), 20)
    harness.generate(prompt(400), 150)
    harness.assert_idle()
    assert len(list(tmp_path.glob("?/*.kv"))) == 7 + 1
    harness.disk.close()
    harness = Harness(f"kv.budget={budget}", on_disk, model=StoredToy())
    pages, segment = (PAGES, SEGMENT) if budget == "128" else (12, 2)
    for length, restored in ((100, 6 * PAGE), (400, PAGE)):
        text = prompt(length)
        request = harness.submit(text, 150)
        harness.finish()
        for _ in range(150):
            held = text if budget == "null" else seen(text, pages, segment)
            text.append(next_token(held))
        assert harness.tokens(request) == text[length:]
        assert harness.outputs[request][0].restored_tokens == {"disk": restored}
    harness.assert_idle()
