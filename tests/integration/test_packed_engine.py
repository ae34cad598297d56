"""Packed pages inside an engine: whatever packs, moves, copies and shares them, texts stay.

The toy model finds every token in packed pages exactly, so texts are compared token by token.
"""

import random

import pytest
import toy
from packed_toy import PackedHarness
from toy import continuation

from memd.engine.messages import Describe, PoolCommand, Preempt, SamplingParams, Submit
from memd.evaluate.guard import MOST_ERROR
from memd.pool.audit import check

QUIET = ("memory.defrag.every_requests=0", "memory.defrag.max_fragmentation=100%")
FORMATS = ("int8", "int4", "fp8")


@pytest.fixture(params=[0, 1], ids=["in step", "a step ahead"])
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are read in their own step, or one step later, as on a GPU."""
    monkeypatch.setattr(toy.Harness, "steps_ahead", request.param)


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(90), k=count)


def moved(engine: PackedHarness) -> int:
    return engine.engine.elasticity.elastic.defragmenter.moved_pages


def make_holes(engine: PackedHarness, seed: int, share: float = 0.7) -> None:
    """Forget most of what is cached, here and there, so that blocks have room."""
    pool, chance = engine.engine.pool, random.Random(seed)
    for page in pool.lru.in_order():
        node = pool.pages.node[page]
        if node is not None and node.is_leaf and page in pool.lru and chance.random() < share:
            pool.drop_prefix(node)
    assert check(pool) == []


def packed_of(engine: PackedHarness, request_id: str) -> list[bool]:
    """For each page of a running sequence whether it is packed."""
    sequence = engine.engine.scheduler.requests[request_id].sequence
    assert sequence is not None
    return [engine.engine.pool.blocks.is_packed(page) for page in sequence.pages]


@pytest.mark.parametrize("form", FORMATS)
def test_text_over_packed_pages(form: str) -> None:
    engine = PackedHarness(form=form)
    text = words(150, 1)
    assert engine.generate(text, 100) == continuation(text, 100)
    assert engine.packed >= 10
    assert engine.model.packed_pages_read > 100
    again = engine.submit(text, 100)
    engine.finish()
    assert engine.cached(again) == 144, "of a packed page all is used or nothing"
    assert engine.tokens(again) == continuation(text, 100)
    engine.assert_idle()


@pytest.mark.usefixtures("pace")
def test_what_is_packed_is_what_the_schedule_names_while_the_length_grows() -> None:
    engine = PackedHarness()
    request = engine.submit(words(10, 2), 300)
    schedule = engine.engine.pool.packing
    assert schedule is not None
    seen = set()
    for _ in range(400):
        engine.step()
        running = engine.engine.scheduler.requests.get(request)
        if running is None:
            break
        if running.sequence is None:
            continue
        due = schedule.packed_pages(running.num_computed - 1)
        packed = [index for index, each in enumerate(packed_of(engine, request)) if each]
        assert packed == list(due)
        seen.add(len(packed))
    assert seen == {0, 2, 6, 10, 14}
    assert engine.tokens(request) == continuation(words(10, 2), 300)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.usefixtures("pace")
def test_c055_two_streams_with_defrag_every_20_tokens_say_what_they_say_without(form: str) -> None:
    engine = PackedHarness("memory.limit=2048 tokens", *QUIET, form=form)
    shared = words(150, 1)
    engine.generate(shared, 4)
    prompts = [[*shared, *words(30, 2)], [*shared[:140], *words(40, 3)]]
    streams = [engine.submit(prompt, 400) for prompt in prompts]
    for turn in range(400):
        if turn % 20 == 0:
            for index in range(4):
                engine.submit(words(20 + 40 * index, 1000 + 50 * turn + index), 2 + index)
        elif turn % 20 == 10:
            make_holes(engine, turn)
            assert engine.ask(PoolCommand(7, "defrag")).error is None
        engine.step()
        tables = [
            request.sequence.pages
            for request in engine.engine.scheduler.running
            if request.sequence is not None
        ]
        assert all(len(set(pages)) == len(pages) for pages in tables)
    engine.finish()
    assert moved(engine) > 40
    assert engine.packed > 60
    for stream, prompt in zip(streams, prompts, strict=True):
        assert engine.tokens(stream) == continuation(prompt, 400)
    engine.assert_idle()


def test_packed_pages_themselves_are_moved_with_their_scales() -> None:
    engine = PackedHarness("memory.limit=4096 tokens", *QUIET)
    prompts = [words(400, seed) for seed in range(8)]
    for prompt in prompts:
        engine.generate(prompt, 1)
        # Packed when they are held again: a prompt is packed after its chunk.
    kept = engine.submit(prompts[3], 200)
    engine.step(10)
    make_holes(engine, 5, share=0.9)
    pool = engine.engine.pool
    before = {page for page in pool.sequences["r9"].pages if pool.blocks.is_packed(page)}
    for _ in range(30):
        engine.ask(PoolCommand(7, "defrag"))
    assert pool.blocks.surplus_blocks <= 0
    engine.finish()
    assert engine.tokens(kept) == continuation(prompts[3], 200)
    assert before
    engine.assert_idle()


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_pressure_with_a_host_tier_changes_no_text(form: str) -> None:
    host = ("memory.host.limit=1MB", "memory.watermark.high=60%", "memory.watermark.low=40%")
    engine = PackedHarness("memory.limit=768 tokens", *host, form=form)
    prompts = [words(100 + 30 * index, 50 + index) for index in range(6)]
    for _ in range(2):
        requests = [engine.submit(prompt, 80) for prompt in prompts]
        engine.finish()
        for request, prompt in zip(requests, prompts, strict=True):
            assert engine.tokens(request) == continuation(prompt, 80)
    counters = engine.engine.pool.counters
    assert counters.transfers["d2h", "ok"] > 20
    assert counters.transfers["h2d", "ok"] > 5
    assert engine.packed > 20
    engine.assert_idle()


@pytest.mark.parametrize("form", ["int4"])
@pytest.mark.usefixtures("pace")
def test_preemptions_change_no_text(form: str) -> None:
    engine = PackedHarness("memory.limit=2048 tokens", form=form)
    prompts = [words(60 + 45 * index, 70 + index) for index in range(4)]
    streams = [engine.submit(prompt, 150) for prompt in prompts]
    for turn in range(120):
        if turn % 9 == 5:
            engine.send(Preempt(8, streams[turn % 4]))
        engine.step()
    engine.finish()
    assert engine.engine.scheduler.counters.preemptions > 5
    for stream, prompt in zip(streams, prompts, strict=True):
        assert engine.tokens(stream) == continuation(prompt, 150)
    engine.assert_idle()


@pytest.mark.usefixtures("pace")
def test_random_traffic_under_pressure_says_what_it_says_alone() -> None:
    chance = random.Random(7)
    engine = PackedHarness(
        "memory.limit=1536 tokens", "memory.host.limit=256kB", "engine.max_batch_tokens=48"
    )
    bases = [words(200, seed) for seed in range(3)]
    asked: dict[str, tuple[list[int], int]] = {}
    for _ in range(24):
        prompt = chance.choice(bases)[: chance.randrange(1, 200)]
        prompt = [*prompt, *words(chance.randrange(0, 90), chance.randrange(9))]
        prompt = prompt or [1]
        count = chance.randrange(1, 100)
        asked[engine.submit(prompt, count)] = prompt, count
        engine.step(chance.randrange(1, 12))
    engine.finish()
    for request, (prompt, count) in asked.items():
        assert engine.tokens(request) == continuation(prompt, count)
    assert engine.packed > 30
    engine.assert_idle()


def test_a_killed_engine_is_resumed_with_what_it_had() -> None:
    """As the api process does it: another engine gets prompt and output so far."""
    prompt = words(90, 5)
    first = PackedHarness()
    request = first.submit(prompt, 200)
    first.step(120)
    so_far = first.tokens(request)
    assert 60 < len(so_far) < 200
    second = PackedHarness()
    second.send(
        Submit(
            request,
            prompt,
            SamplingParams(max_tokens=200, seed=1, temperature=0.0),
            "",
            0,
            "",
            output_tokens=so_far,
        )
    )
    second.finish()
    assert so_far + second.tokens(request) == continuation(prompt, 200)
    assert second.packed > 5


@pytest.mark.parametrize("fault", ["error"])
def test_packing_that_fails_leaves_pages_full_and_texts_as_they_are(fault: str) -> None:
    engine = PackedHarness()
    engine.arm(moves=fault)
    prompt = words(100, 3)
    assert engine.generate(prompt, 150) == continuation(prompt, 150)
    assert engine.packed == 0
    packing = engine.engine.snapshot().packing
    assert packing is not None
    assert packing.due_pages["failed"] > 5
    engine.arm(moves=None)
    other = words(100, 4)
    assert engine.generate(other, 150) == continuation(other, 150)
    assert engine.packed > 5
    engine.assert_idle()


def test_packing_ends_with_a_reason_when_it_loses_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = PackedHarness("memory.limit=4096 tokens")
    monkeypatch.setitem(MOST_ERROR, "int8", 1e-9)
    prompt = words(30, 3)
    events = []
    request = engine.submit(prompt, 900)
    for _ in range(1000):
        engine.engine.step()
        for message in engine.port.take():
            events += message.events
            for output in message.outputs:
                engine.outputs.setdefault(output.request_id, []).append(output)
        if not engine.engine.busy:
            break
    assert engine.tokens(request) == continuation(prompt, 900)
    assert [event.kind for event in events if event.kind.startswith("packing")] == [
        "packing_stopped"
    ]
    packing = engine.engine.snapshot().packing
    assert packing is not None
    assert packing.stopped is not None
    assert "int8" in packing.stopped
    assert 20 < engine.packed < 50, "what is packed stays, and it took several packings"
    assert engine.engine.snapshot().pool.packed_pages > 20
    assert check(engine.engine.pool) == []


def test_a_text_that_fits_only_when_it_is_packed() -> None:
    """Twice as long as all full pages of the pool together; refused with full pages."""
    prompt, limit = words(2000, 1), "memory.limit=1536 tokens"
    engine = PackedHarness(limit, "memory.page_tokens=64", form="int4")
    longest = engine.ready.max_model_len
    assert longest > 2048
    request = engine.submit(prompt, 40)
    engine.finish()
    assert engine.tokens(request) == continuation(prompt, 40)
    refused = toy.Harness(limit, "memory.page_tokens=64")
    other = refused.submit(prompt, 40)
    refused.finish()
    assert refused.end(other).error_code == "context_length_exceeded"
    engine.assert_idle()


def test_the_snapshot_tells_what_is_packed_and_what_it_saves() -> None:
    engine = PackedHarness(form="int4")
    request = engine.submit(words(300, 1), 40)
    engine.step(20)
    snapshot = engine.engine.snapshot()
    packing, pool = snapshot.packing, snapshot.pool
    assert packing is not None
    assert packing.format == "int4"
    assert pool.packed_pages == sum(packed_of(engine, request)) > 10
    assert pool.packed_blocks >= 1
    layout = engine.engine.pool.layout
    saved = pool.packed_pages * (layout.page_bytes - layout.size_bytes(True))
    assert packing.saved_bytes == saved
    assert packing.compression_ratio is not None
    assert packing.compression_ratio > 2
    assert packing.mean_error is not None
    assert 0 < packing.mean_error <= packing.worst_error < packing.most_error
    blocks = engine.ask(Describe(9, "blocks", 0, 100)).result
    assert blocks is not None
    assert sum(blocks["columns"]["packed"]) == pool.packed_blocks


def test_full_pages_have_no_packing_to_tell_of() -> None:
    engine = toy.Harness()
    engine.generate(words(40, 1), 40)
    snapshot = engine.engine.snapshot()
    assert snapshot.packing is None
    assert (snapshot.pool.packed_pages, snapshot.pool.packed_blocks) == (0, 0)
