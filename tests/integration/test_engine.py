"""The inline engine over the toy model: sharing, chunks and preemptions change no text."""

import random

import pytest
import toy
from paces import both_paces  # noqa: F401
from toy import Harness, ToyModel, continuation

from memd.engine.messages import (
    Abort,
    ApplySettings,
    Describe,
    PoolCommand,
    Preempt,
    SetPriority,
)
from memd.engine.scheduler import MAX_STARTS


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(toy.VOCAB - 1), k=length)


def test_generates_the_continuation() -> None:
    harness = Harness()
    assert harness.generate(prompt(20), 30) == continuation(prompt(20), 30)
    harness.assert_idle()


@pytest.mark.parametrize("chunk", [16, 17, 64, 512])
def test_chunks_change_nothing(chunk: int) -> None:
    harness = Harness(f"engine.max_batch_tokens={chunk}")
    ids = [harness.submit(prompt(length), 20) for length in (1, 15, 16, 17, 100, 200)]
    harness.finish()
    for request_id, length in zip(ids, (1, 15, 16, 17, 100, 200), strict=True):
        assert harness.tokens(request_id) == continuation(prompt(length), 20)
        assert harness.end(request_id).finish_reason == "length"
    harness.assert_idle()


@pytest.mark.parametrize("shared", [0, 1, 15, 16, 17, 300, 511])
def test_shares_to_the_token(shared: int) -> None:
    harness = Harness()
    harness.generate(prompt(512), 4)
    other = prompt(512)[:shared] + prompt(200, seed=2)
    request_id = harness.submit(other, 10)
    harness.finish()
    assert harness.cached(request_id) == shared
    assert harness.tokens(request_id) == continuation(other, 10)


def test_a_repeated_prompt_hits_all_but_one_token_and_its_output_too() -> None:
    harness = Harness()
    first = harness.generate(prompt(100), 20)
    request_id = harness.submit(prompt(100), 20)
    harness.finish()
    assert harness.cached(request_id) == 99
    request_id = harness.submit(prompt(100) + first, 5)
    harness.finish()
    assert harness.cached(request_id) == 119


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (16, 15), (31, 30), (32, 31), (33, 32)])
def test_a_prompt_wholly_in_the_cache(length: int, cached: int) -> None:
    """One token is always left to compute (case C032)."""
    harness = Harness()
    assert harness.generate(prompt(length)) == continuation(prompt(length), 8)
    request_id = harness.submit(prompt(length))
    harness.finish()
    assert harness.cached(request_id) == cached
    assert harness.tokens(request_id) == continuation(prompt(length), 8)


def test_lookup_sees_the_whole_prompt_whatever_the_chunk() -> None:
    """Case C036."""
    harness = Harness("engine.max_batch_tokens=64")
    harness.generate(prompt(512), 1)
    before = harness.model.computed_tokens
    request_id = harness.submit(prompt(512), 1)
    harness.finish()
    assert harness.cached(request_id) == 511
    assert harness.model.computed_tokens - before == 1


def test_salts_share_nothing() -> None:
    """Case C028."""
    harness = Harness()
    for salt, cached in (("s1", 0), ("s1", 511), ("s2", 0)):
        request_id = harness.submit(prompt(512), 1, salt=salt)
        harness.finish()
        assert harness.cached(request_id) == cached


def test_requests_that_arrive_together_compute_a_prefix_once() -> None:
    harness = Harness("engine.max_batch_tokens=64")
    prompts = [prompt(320) + prompt(10, seed=seed) for seed in range(1, 6)]
    ids = [harness.submit(each, 5) for each in prompts]
    harness.finish()
    for request_id, each in zip(ids, prompts, strict=True):
        assert harness.tokens(request_id) == continuation(each, 5)
    assert harness.model.computed_tokens <= 330 + 5 * 10 + 5 * 5
    harness.assert_idle()


def test_a_pool_of_1024_tokens_under_24_requests() -> None:
    harness = Harness("engine.reserve_tokens=16")
    prompts = [prompt(40 + 9 * index, seed=index) for index in range(24)]
    ids = [harness.submit(each, 120) for each in prompts]
    harness.finish()
    for request_id, each in zip(ids, prompts, strict=True):
        assert harness.tokens(request_id) == continuation(each, 120)
    snapshot = harness.engine.snapshot()
    assert snapshot.preemptions > 0
    assert sum(snapshot.pool.evicted_pages.values()) > 0
    assert snapshot.finished["length"] == 24
    harness.assert_idle()


def test_two_that_cannot_both_fit_finish_one_after_the_other() -> None:
    """Case C014."""
    harness = Harness()
    ids = [harness.submit(prompt(500, seed=seed), 300, ignore_eos=True) for seed in (1, 2)]
    harness.finish()
    for request_id, seed in zip(ids, (1, 2), strict=True):
        assert harness.tokens(request_id) == continuation(prompt(500, seed=seed), 300)
    assert harness.engine.snapshot().preemptions >= 1
    harness.assert_idle()


def test_a_pool_far_too_small_makes_no_endless_preemptions() -> None:
    """Case C016."""
    harness = Harness("memory.limit=128 tokens", "engine.reserve_tokens=0")
    ids = [harness.submit(prompt(60, seed=seed), 60) for seed in range(20)]
    harness.finish()
    for seed, request_id in enumerate(ids):
        assert harness.tokens(request_id) == continuation(prompt(60, seed=seed), 60)
    assert harness.engine.snapshot().preemptions <= 20
    harness.assert_idle()


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    """Case C012."""
    harness = Harness("model.max_len=2048")
    refused = harness.submit(prompt(1100), 16)
    control = harness.submit(prompt(10), 5)
    harness.step(20)
    end = harness.end(refused)
    assert end.finish_reason == "error"
    assert end.error_code == "context_length_exceeded"
    assert end.error is not None
    assert "69 pages" in end.error
    assert "64" in end.error
    assert harness.tokens(control) == continuation(prompt(10), 5)


def test_the_served_length_is_fitted_to_the_pool() -> None:
    """Case C085."""
    harness = Harness("model.max_len=2048")
    limit = harness.ready.max_model_len
    assert limit == 1024
    ids = {length: harness.submit(prompt(length), 1) for length in (limit - 1, limit, limit + 1)}
    harness.finish()
    assert harness.end(ids[limit - 1]).finish_reason == "length"
    for length in (limit, limit + 1):
        assert harness.end(ids[length]).finish_reason == "error"
        assert str(limit) in str(harness.end(ids[length]).error)
        assert str(length) in str(harness.end(ids[length]).error)


def test_a_preempted_request_goes_on_as_if_nothing_had_happened() -> None:
    """Seeded sampling and penalties survive a preemption; nothing is emitted twice (case C018)."""
    options = {"temperature": 1.0, "seed": 7, "frequency_penalty": 1.0, "ignore_eos": True}
    alone = Harness().generate(prompt(30), 200, **options)
    harness = Harness()
    request_id = harness.submit(prompt(30), 200, **options)
    for mark in (50, 120):
        while len(harness.tokens(request_id)) < mark:
            harness.step()
        assert harness.ask(Preempt(mark, request_id)).error is None
    harness.finish()
    assert harness.tokens(request_id) == alone
    assert len(alone) == 200
    assert harness.engine.snapshot().preemptions == 2


@pytest.mark.parametrize("when", [0, 1, 2, 5])
def test_abort_is_legal_in_every_state(when: int) -> None:
    harness = Harness("engine.max_batch_tokens=64")
    victim = harness.submit(prompt(150), 50)
    other = harness.submit(prompt(30, seed=1), 20)
    harness.step(when)
    harness.send(Abort(victim))
    harness.finish()
    assert harness.end(victim).finish_reason == "abort"
    assert harness.tokens(other) == continuation(prompt(30, seed=1), 20)
    harness.assert_idle()


def test_an_aborted_waiting_request_is_never_computed() -> None:
    """Case C004."""
    harness = Harness("engine.max_sequences=1")
    first = harness.submit(prompt(10), 40)
    harness.step()
    queued = [harness.submit(prompt(100, seed=seed), 40) for seed in range(1, 21)]
    harness.step()
    for request_id in queued:
        harness.send(Abort(request_id))
    last = harness.submit(prompt(10, seed=99), 4)
    computed = harness.model.computed_tokens
    harness.finish()
    assert harness.tokens(first) == continuation(prompt(10), 40)
    assert harness.tokens(last) == continuation(prompt(10, seed=99), 4)
    assert harness.model.computed_tokens - computed <= 40 + 10 + 4
    assert harness.engine.snapshot().finished["abort"] == 20


def test_late_messages_about_unknown_requests_are_ignored() -> None:
    harness = Harness()
    harness.send(Abort("nobody"))
    harness.step()
    assert harness.ask(Preempt(1, "nobody")).error is not None
    harness.assert_idle()


def test_one_failing_request_hurts_no_other() -> None:
    """Case C097, the engine's half."""
    model = ToyModel()
    harness = Harness(model=model)
    bad = harness.submit([1, 2, 3], 20)
    good = [harness.submit(prompt(20, seed=seed), 20) for seed in range(3)]
    harness.step(5)
    poison = harness.tokens(bad)[-1]
    model.fail_on = {poison}
    harness.finish()
    assert harness.end(bad).finish_reason == "error"
    assert harness.end(bad).error == "the model failed on this request"
    for seed, request_id in enumerate(good):
        expected = continuation(prompt(20, seed=seed), 20)
        if poison not in prompt(20, seed=seed) + expected:
            assert harness.tokens(request_id) == expected
    harness.assert_idle()
    assert harness.engine.snapshot().finished["error"] >= 1


def test_logits_that_are_no_numbers_fail_their_request_alone() -> None:
    harness = Harness(model=ToyModel(nan_on={5}))
    bad = harness.submit([1, 5, 3], 20)
    clean = next(
        [seed, 11] for seed in range(90) if seed != 5 and 5 not in continuation([seed, 11], 10)
    )
    good = harness.submit(clean, 10)
    harness.finish()
    assert harness.end(bad).error_code == "numerical_error"
    assert harness.tokens(bad) == []
    assert harness.tokens(good) == continuation(clean, 10)
    snapshot = harness.engine.snapshot()
    assert snapshot.nan_logits == 1
    assert snapshot.pool.quarantined_pages == 1
    reply = harness.ask(PoolCommand(1, "audit"))
    assert reply.result is not None
    assert reply.result["released_quarantine_pages"] == 1
    harness.assert_idle()


def test_an_invalid_priority_order_is_kept() -> None:
    harness = Harness("engine.max_sequences=1")
    first = harness.submit(prompt(10), 5)
    harness.step()
    low = harness.submit(prompt(10, seed=1), 1, priority=5)
    high = harness.submit(prompt(10, seed=2), 1, priority=-5)
    order: list[str] = []
    for _ in range(30):
        harness.step()
        order += [r for r in (first, low, high) if r not in order and r in harness.outputs]
    assert order == [first, high, low]


def test_new_marks_reclaim_at_once_and_fail_nobody() -> None:
    harness = Harness("memory.watermark.high=90%", "memory.watermark.low=70%")
    for seed in range(6):
        harness.generate(prompt(150, seed=seed), 4)
    running = harness.submit(prompt(100, seed=50), 60)
    harness.step(3)
    assert harness.engine.pool.occupied_pages > 0.6 * 64
    values = {"memory.watermark.high": 0.6, "memory.watermark.low": 0.4}
    reply = harness.ask(ApplySettings(1, 2, values))
    assert reply.result == {"revision": 2}
    harness.step(2)
    assert harness.engine.pool.occupied_pages <= 0.6 * 64
    harness.finish()
    assert harness.tokens(running) == continuation(prompt(100, seed=50), 60)
    snapshot = harness.engine.snapshot()
    assert snapshot.revision == 2
    assert snapshot.settings["memory.watermark.high"] == 0.6


def test_auto_can_be_restored_live() -> None:
    harness = Harness()
    default = harness.engine.scheduler.limits.max_batch_tokens
    harness.ask(ApplySettings(1, 2, {"engine.max_batch_tokens": 16}))
    assert harness.engine.scheduler.limits.max_batch_tokens == 16
    harness.ask(ApplySettings(2, 3, {"engine.max_batch_tokens": "auto"}))
    assert harness.engine.scheduler.limits.max_batch_tokens == default
    assert harness.ask(ApplySettings(3, 4, {"model.path": "x"})).error == "not live: model.path"


def test_operator_commands() -> None:
    harness = Harness()
    harness.generate(prompt(320), 4)
    blocks = harness.ask(Describe(1, "blocks")).result
    assert blocks is not None
    assert sum(blocks["columns"]["cached"]) == 21
    prefixes = harness.ask(Describe(2, "prefixes")).result
    assert prefixes is not None
    assert prefixes["prefixes"][0]["tokens"] == 323
    assert harness.ask(PoolCommand(3, "reclaim", 5)).result == {"evicted_pages": 5}
    audit = harness.ask(PoolCommand(4, "audit")).result
    assert audit is not None
    assert audit["clean"] is True
    assert harness.ask(PoolCommand(5, "flush")).result == {"evicted_pages": 16}
    assert harness.engine.pool.blocks.committed_blocks == 0


def test_stop_tokens_and_minimum_length() -> None:
    harness = Harness()
    expected = continuation(prompt(9), 30)
    stop = expected[10]
    first = expected.index(stop)
    request_id = harness.submit(prompt(9), 30, stop_token_ids=[stop])
    harness.finish()
    assert harness.tokens(request_id) == expected[: first + 1]
    assert harness.end(request_id).finish_reason == "stop"
    request_id = harness.submit(prompt(9), 30, stop_token_ids=[stop], min_tokens=first + 5)
    harness.finish()
    assert len(harness.tokens(request_id)) >= first + 5
    assert stop not in harness.tokens(request_id)[: first + 5]


def test_ids_beyond_the_tokenizer_are_never_sampled() -> None:
    """Case C078."""
    harness = Harness(vocab_limit=40)
    tokens = harness.generate([1, 2, 3], 500, temperature=5.0, logprobs=3)
    assert len(tokens) == 500
    assert max(tokens) < 40


def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    harness = Harness()
    request_id = harness.submit(prompt(12), 5, logprobs=2, logit_bias={3: 100.0}, prompt_logprobs=1)
    harness.finish()
    assert harness.tokens(request_id) == [3] * 5
    outputs = harness.outputs[request_id]
    context = prompt(12)
    for output in outputs:
        assert output.logprobs is not None
        expected = toy.logits_after(context).log_softmax(-1)
        assert output.logprobs[0].logprob == pytest.approx(expected[3].item(), abs=1e-5)
        assert [token for token, _ in output.logprobs[0].top] == expected.topk(2).indices.tolist()
        context.append(3)
    told = outputs[0].prompt_logprobs
    assert told is not None
    assert told[0] is None
    for position in range(1, 12):
        entry = told[position]
        assert entry is not None
        expected = toy.logits_after(prompt(12)[:position]).log_softmax(-1)
        assert entry.logprob == pytest.approx(expected[prompt(12)[position]].item(), abs=1e-5)


def test_a_prompt_can_be_scored_without_output_even_when_cached() -> None:
    """Case C082, the engine's half: every position is told, cached or not, chunked or not."""
    harness = Harness("engine.max_batch_tokens=16")
    harness.generate(prompt(100), 5)
    request_id = harness.submit(prompt(100), 0, prompt_logprobs=0)
    harness.finish()
    assert harness.tokens(request_id) == []
    assert harness.end(request_id).finish_reason == "length"
    told = harness.outputs[request_id][0].prompt_logprobs
    assert told is not None
    assert len(told) == 100
    assert [entry is None for entry in told].count(True) == 1


def test_counters_add_up_after_random_traffic() -> None:
    rng = random.Random(3)
    harness = Harness("memory.limit=512 tokens", "engine.max_batch_tokens=48")
    expected: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for _ in range(150):
        if rng.random() < 0.4:
            stem = prompt(rng.choice([5, 40, 100]), seed=rng.randrange(3))
            text = stem + prompt(rng.randrange(1, 30), seed=rng.randrange(4))
            count = rng.randrange(1, 60)
            expected[harness.submit(text, count, salt=rng.choice(["", "x"]))] = continuation(
                text, count
            )
        if rng.random() < 0.05 and expected:
            aborted.add(rng.choice(list(expected)))
            harness.send(*(Abort(request_id) for request_id in aborted))
        if rng.random() < 0.05:
            harness.send(PoolCommand(1, "flush"))
        harness.step(rng.randrange(3))
    harness.finish()
    for request_id, tokens in expected.items():
        if harness.end(request_id).finish_reason == "length":
            assert harness.tokens(request_id) == tokens
        else:
            assert request_id in aborted
            assert harness.tokens(request_id) == tokens[: len(harness.tokens(request_id))]
    snapshot = harness.engine.snapshot()
    assert sum(snapshot.finished.values()) == len(expected)
    pool = snapshot.pool
    assert (
        sum(pool.prefix_hit_tokens.values()) + sum(pool.prefix_miss_tokens.values())
        == pool.prefix_query_tokens
    )
    assert sum(snapshot.prompt_tokens.values()) == pool.prefix_query_tokens
    harness.assert_idle()


def test_tokens_decide_a_hit_not_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys cut to four bits collide all the time and still give no wrong hit (case C024)."""
    for module in ("prefix_tree", "pool", "audit"):
        monkeypatch.setattr(
            f"memd.pool.{module}.hash", lambda value: hash(value) & 0xF, raising=False
        )
    harness = Harness()
    for seed in range(50):
        text = [seed, *prompt(63, seed=seed)]
        request_id = harness.submit(text, 6)
        harness.finish()
        assert harness.cached(request_id) == 0
        assert harness.tokens(request_id) == continuation(text, 6)
    together = [harness.submit(prompt(64, seed=seed), 6) for seed in range(50, 60)]
    harness.finish()
    for seed, request_id in zip(range(50, 60), together, strict=True):
        assert harness.tokens(request_id) == continuation(prompt(64, seed=seed), 6)


def test_a_recycled_page_forgets_what_it_held() -> None:
    """Case C030."""
    harness = Harness()
    harness.generate(prompt(400, seed=1), 4)
    for seed in range(2, 8):
        harness.generate(prompt(400, seed=seed), 4)
    request_id = harness.submit(prompt(400, seed=1), 4)
    harness.finish()
    assert harness.cached(request_id) == 0
    reply = harness.ask(PoolCommand(1, "audit"))
    assert reply.result is not None
    assert reply.result["problems"] == []


@pytest.mark.parametrize("field", ["tenant", "salt"])
def test_tenants_get_fair_shares(field: str) -> None:
    """A tenant with a long queue does not hold up one with a short queue; without keys, a salt."""
    harness = Harness("engine.max_sequences=2")

    def submit(seed: int, who: str) -> str:
        return harness.submit(prompt(60, seed=seed), 20, **{field: who})

    crowd = [submit(seed, "crowd") for seed in range(20)]
    harness.step(3)
    single = [submit(100 + n, "single") for n in range(4)]
    while not all(each in harness.outputs and harness.end_of(each) for each in single):
        harness.step()
    finished = [each for each in crowd if each in harness.outputs and harness.end_of(each)]
    assert len(finished) <= 9
    harness.finish()
    harness.assert_idle()


def test_a_tenant_gains_nothing_by_many_salts() -> None:
    harness = Harness("engine.max_sequences=1")
    many = [
        harness.submit(prompt(60, seed=seed), 20, tenant="many", salt=f"many\0{seed}")
        for seed in range(8)
    ]
    one = [harness.submit(prompt(60, seed=50 + n), 20, tenant="one") for n in range(4)]
    while not all(each in harness.outputs and harness.end_of(each) for each in one):
        harness.step()
    finished = [each for each in many if each in harness.outputs and harness.end_of(each)]
    assert len(finished) <= 5


def test_priority_goes_before_shares_and_arrival() -> None:
    harness = Harness("engine.max_sequences=1")
    first = harness.submit(prompt(20), 5, tenant="a")
    harness.step()
    last = harness.submit(prompt(20, seed=1), 5, tenant="b", priority=1)
    urgent = harness.submit(prompt(20, seed=2), 5, tenant="a", priority=-1)
    harness.finish()
    assert list(harness.outputs) == [first, urgent, last]


def test_a_priority_changed_while_it_waits_or_runs() -> None:
    harness = Harness("engine.max_sequences=1")
    first = harness.submit(prompt(20), 5)
    harness.step()
    second = harness.submit(prompt(20, seed=1), 5)
    third = harness.submit(prompt(20, seed=2), 5)
    for request_id, priority in ((third, -1), (first, 7)):
        reply = harness.ask(SetPriority(priority, request_id, priority))
        assert reply.result == {"request_id": request_id, "priority": priority}
    harness.finish()
    assert list(harness.outputs) == [first, third, second]
    assert harness.ask(SetPriority(9, first, 0)).error == "no open request of this id"
    harness.assert_idle()


@pytest.mark.parametrize(("budget", "started"), [(800, 40), (4096, MAX_STARTS)])
@pytest.mark.parametrize("salts", [1, 3])
def test_a_step_starts_as_many_as_its_tokens_allow(budget: int, started: int, salts: int) -> None:
    harness = Harness("memory.limit=8192 tokens", f"engine.max_batch_tokens={budget}")
    prompts = [[seed, *prompt(19, seed)] for seed in range(90)]  # none has a page of another
    ids = [harness.submit(each, 8, salt=str(i % salts)) for i, each in enumerate(prompts)]
    for expected in (started, min(2 * started, 90)):
        harness.step()
        assert len(harness.engine.scheduler.running) == expected
    harness.finish()
    for request_id, each in zip(ids, prompts, strict=True):
        assert harness.tokens(request_id) == continuation(each, 8)
    harness.assert_idle()


def test_prefill_goes_on_beside_many_decodes() -> None:
    """Decoding sequences do not use up what prefill may compute in a step."""
    harness = Harness("engine.max_batch_tokens=16", "engine.reserve_tokens=0")
    decoding = [harness.submit([seed, seed + 1], 60) for seed in range(20)]
    harness.step(10)
    late = harness.submit(prompt(100, seed=7), 4)
    steps = 0
    while late not in harness.outputs:
        harness.step()
        steps += 1
    assert steps <= 100 // 4 + 5
    harness.finish()
    for seed, request_id in enumerate(decoding):
        assert harness.tokens(request_id) == continuation([seed, seed + 1], 60)


def test_prefixes_that_part_inside_a_page_are_counted_once() -> None:
    """Free, evictable and held pages sum to the pool at every idle moment (case C010)."""
    harness = Harness()
    rng = random.Random(10)
    stem = prompt(24)
    for number in range(100):
        harness.generate(stem + prompt(rng.randrange(1, 200), seed=number), rng.randrange(1, 9))
        harness.assert_idle()


def test_a_contradiction_is_reported_and_ends_nobody() -> None:
    """A wrong count is found and told by the audit; the engine goes on (case C010)."""
    harness = Harness()
    harness.generate(prompt(100), 4)
    harness.engine.pool.pages.references += 1
    harness.send(PoolCommand(1, "audit"))
    harness.engine.step()
    (report,) = harness.port.take()
    assert report.replies[0].result is not None  # type: ignore[union-attr]
    assert report.replies[0].result["clean"] is False  # type: ignore[union-attr]
    harness.engine.pool.pages.references -= 1
    assert harness.generate(prompt(50, seed=1), 8) == continuation(prompt(50, seed=1), 8)


def test_a_sequence_preempted_before_its_nan_is_known_fails() -> None:
    harness = Harness(model=ToyModel(nan_on={5}))
    request_id = harness.submit([5, *prompt(20)], 8)
    harness.step()
    harness.send(Preempt(1, request_id))
    harness.finish()
    assert harness.end(request_id).error_code == "numerical_error"
