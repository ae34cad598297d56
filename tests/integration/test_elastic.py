"""The elastic pool inside an engine: texts stay what they are while pages move and blocks go."""

import random
from typing import Any

import pytest
from toy import Harness, continuation

from memd.engine.messages import ApplySettings, PoolCommand, Preempt
from memd.pool.audit import check

SMALL = ("memory.page_tokens=64", "memory.limit=4096 tokens")  # 16 blocks of 4 pages
QUIET = ("memory.defrag.every_requests=0", "memory.defrag.max_fragmentation=100%")


class StepAhead(Harness):
    """As on a GPU: results are read one step later."""

    steps_ahead = 1


@pytest.fixture(params=[Harness, StepAhead], ids=["at once", "one step ahead"])
def kind(request: pytest.FixtureRequest) -> type[Harness]:
    return request.param


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(90), k=count)


def defrag(engine: Harness) -> None:
    reply = engine.ask(PoolCommand(7, "defrag"))
    assert reply.error is None
    assert reply.result is not None


def fill(engine: Harness, seed: int, count: int = 8) -> list[str]:
    """Short requests, some of which are still running when the others have ended."""
    return [
        engine.submit(words(5 + 29 * (index % 5), seed + index), 2 + 3 * (index % 3))
        for index in range(count)
    ]


def make_holes(engine: Harness, seed: int) -> None:
    """Forget most of what is cached, here and there, so that blocks have room."""
    pool, chance = engine.engine.pool, random.Random(seed)
    for page in pool.lru.in_order():
        node = pool.pages.node[page]
        if node is not None and node.is_leaf and page in pool.lru and chance.random() < 0.7:
            pool.drop_prefix(node)
    assert check(pool) == []


def moved(engine: Harness) -> int:
    return engine.engine.elasticity.elastic.defragmenter.moved_pages


@pytest.mark.parametrize("pages", ["1", "auto"])
def test_c055_two_streams_with_defrag_every_20_tokens_say_what_they_say_without(
    kind: type[Harness], pages: str
) -> None:
    engine = kind(*SMALL, *QUIET, f"memory.defrag.pages_per_step={pages}")
    shared = words(150, 1)
    engine.generate(shared, 4)  # prefix hits, and a part-filled page to copy on write
    prompts = [[*shared, *words(30, 2)], [*shared[:140], *words(40, 3)]]
    streams = [engine.submit(prompt, 400) for prompt in prompts]
    for turn in range(400):
        if turn % 20 == 0:
            fill(engine, 1000 + 50 * turn)
        elif turn % 20 == 10:
            make_holes(engine, turn)
            defrag(engine)
        engine.step()
    engine.finish()
    assert moved(engine) > 40
    for stream, prompt in zip(streams, prompts, strict=True):
        assert engine.tokens(stream) == continuation(prompt, 400)
    engine.assert_idle()


@pytest.mark.parametrize("order", ["preempt", "host"])
def test_texts_stay_while_pages_move_between_preemptions_and_copies_to_the_host(
    kind: type[Harness], order: str
) -> None:
    host = ("memory.host.limit=1MB", "memory.watermark.high=30%", "memory.watermark.low=10%")
    engine = kind(*SMALL, *QUIET, *(host if order == "host" else ()))
    prompts = [words(60 + 25 * index, 50 + index) for index in range(4)]
    streams = [engine.submit(prompt, 60) for prompt in prompts]
    for turn in range(60):
        if turn % 6 == 0:
            fill(engine, 5000 + 50 * turn, count=5)
        elif turn % 6 == 3:
            make_holes(engine, turn)
            defrag(engine)
        if order == "preempt" and turn % 8 == 5:
            engine.send(Preempt(8, streams[turn % 4]))
        engine.step()
    engine.finish()
    assert moved(engine) > 10
    for stream, prompt in zip(streams, prompts, strict=True):
        assert engine.tokens(stream) == continuation(prompt, 60)
    if order == "host":
        assert engine.engine.pool.counters.transfers["d2h", "ok"] > 5
    engine.assert_idle()


def test_c057_an_idle_pool_and_one_short_request_are_not_fragmented() -> None:
    engine = Harness("memory.limit=4096 tokens", "memory.elastic.idle=10s")

    def wait_a_minute() -> None:
        for _ in range(60):
            engine.time += 1.0
            engine.step()

    wait_a_minute()
    engine.generate(words(36, 1), 4)
    wait_a_minute()
    elastic = engine.engine.snapshot().elastic
    assert elastic.fragmentation_ratio == 0
    assert elastic.defrag_moved_pages == 0
    assert not any(count for run in elastic.defrag_runs.values() for count in run.values())
    assert engine.engine.pool.blocks.committed_blocks == 1, "what holds the cached pages stays"


def test_c059_texts_stay_while_the_pool_grows_and_shrinks_ten_times(kind: type[Harness]) -> None:
    engine = kind(*SMALL, "memory.elastic.idle=0s")
    prompts = [words(70, 1), words(130, 2)]
    streams = [engine.submit(prompt, 240) for prompt in prompts]
    for turn in range(240):
        if turn % 6 == 0:
            tokens = 1024 if turn % 12 == 0 else 4096
            reply = engine.ask(ApplySettings(9, turn, {"memory.limit": f"{tokens} tokens"}))
            assert reply.error is None
            fill(engine, 3000 + 50 * turn, count=9)
        engine.step()
    elastic = engine.engine.snapshot().elastic
    assert sum(elastic.grown_blocks.values()) >= 10
    assert elastic.shrunk_blocks["limit"] + elastic.shrunk_blocks["idle"] >= 10
    engine.finish()
    for stream, prompt in zip(streams, prompts, strict=True):
        assert engine.tokens(stream) == continuation(prompt, 240)
    engine.assert_idle()


def set_limit(engine: Harness, limit: str | int) -> str | None:
    return engine.ask(ApplySettings(3, 2, {"memory.limit": limit})).error


def test_a_lower_limit_takes_cached_pages_moves_others_and_gives_blocks_back() -> None:
    engine = Harness(*SMALL, *QUIET)
    running = engine.submit(words(20, 1), 150)
    fill(engine, 10, count=40)
    engine.step(30)
    pool = engine.engine.pool
    before = pool.blocks.committed_blocks
    assert set_limit(engine, "768 tokens") is None
    assert pool.counters.evicted["watermark"] > 0
    engine.finish()
    assert before > 3
    assert pool.capacity_pages == pool.blocks.limit_pages == 12
    assert pool.blocks.committed_blocks <= 3
    assert engine.tokens(running) == continuation(words(20, 1), 150)
    elastic = engine.engine.snapshot().elastic
    assert elastic.limit_waits_for is None
    assert elastic.shrunk_blocks["limit"] >= before - 3
    assert elastic.max_model_len == 768


def test_a_lower_limit_waits_for_what_was_accepted_and_refuses_what_comes_after() -> None:
    engine = Harness(*SMALL)
    long = engine.submit(words(1500, 1), 60)
    waiting = engine.submit(words(1400, 2), 60)
    engine.step(3)
    assert set_limit(engine, "512 tokens") is None
    assert engine.engine.snapshot().elastic.limit_waits_for == "requests"
    refused = engine.submit(words(500, 3), 100)
    engine.step()
    assert engine.end(refused).error_code == "context_length_exceeded"
    assert "512" in str(engine.end(refused).error)
    engine.finish()
    assert engine.tokens(long) == continuation(words(1500, 1), 60)
    assert engine.tokens(waiting) == continuation(words(1400, 2), 60)
    engine.step()
    engine.finish()
    pool = engine.engine.pool
    assert (pool.capacity_pages, pool.blocks.committed_blocks <= 2) == (8, True)
    assert set_limit(engine, "4096 tokens") is None
    prompt = words(2000, 4)
    assert engine.generate(prompt, 5) == continuation(prompt, 5), "and it can be raised again"


@pytest.mark.parametrize("limit", ["1 tokens", 1, 10**18])
def test_a_limit_that_cannot_be_is_refused_with_the_numbers(limit: str | int) -> None:
    engine = Harness(*SMALL)
    error = set_limit(engine, limit)
    assert error is not None
    assert "memory.limit" in error
    assert engine.engine.pool.capacity_pages == 64


def test_pressure_takes_empty_blocks_then_cached_pages_and_lets_the_pool_grow_back() -> None:
    engine = Harness(*SMALL, "memory.elastic.idle=1h", "memory.elastic.reserve=64KiB")
    elastic, blocks = engine.engine.elasticity.elastic, engine.engine.pool.blocks
    free = [10**9]
    assert elastic.pressure is not None
    elastic.pressure._free_bytes = lambda: free[0]
    fill(engine, 10, count=40)
    running = engine.submit(words(20, 1), 100)
    engine.step(40)
    before = blocks.committed_blocks
    assert before >= 5
    free[0] = 60 << 10  # 20 KiB short of the reserve and a quarter: 5 blocks
    engine.time += 1.0
    engine.step(3)
    assert engine.engine.snapshot().elastic.under_pressure
    for _ in range(20):
        engine.step()
    assert blocks.committed_blocks <= max(1, before - 5)
    free[0] = 70 << 10  # above the reserve, below the relief: neither grows nor shrinks
    engine.time += 1.0
    engine.step(2)
    assert engine.engine.snapshot().elastic.under_pressure
    free[0] = 10**9
    engine.time += 1.0
    engine.finish()
    snapshot = engine.engine.snapshot().elastic
    assert not snapshot.under_pressure
    assert snapshot.target_pages == 64
    assert snapshot.shrunk_blocks["pressure"] >= 5
    assert engine.tokens(running) == continuation(words(20, 1), 100)


class DeviceQueue:
    """What was enqueued on the device and may still run, and which blocks it touches."""

    def __init__(self, engine: Harness) -> None:
        self.pending: list[set[int]] = []
        self.decommits = 0
        inner, runner = engine.engine, engine.engine._runner
        self._per_block = inner.pool.blocks.pages_per_block
        arena = inner.pool.blocks._backing
        move, launch, decommit = runner.move, runner.launch, arena.decommit

        def moving(moves: Any) -> None:
            self.pending.append(self._blocks([each.source for each in moves]))
            move(moves)

        def launching(plan: Any) -> Any:
            pages = [page for chunk in plan.chunks for page in chunk.request.sequence.pages]
            mine = self._blocks(pages)
            self.pending.append(mine)
            collect = launch(plan)

            def collecting() -> Any:  # the device works in order
                while any(each is mine for each in self.pending):
                    self.pending.pop(0)
                return collect()

            return collecting

        def giving_back(block: Any) -> None:
            assert not any(block in blocks for blocks in self.pending)
            self.decommits += 1
            decommit(block)

        runner.move, runner.launch = moving, launching
        arena.decommit, arena.settle = giving_back, self.pending.clear

    def _blocks(self, pages: list[int]) -> set[int]:
        return {page // self._per_block for page in pages}


def test_no_block_is_given_back_that_work_on_the_device_may_still_touch() -> None:
    engine = StepAhead(*SMALL, *QUIET, "memory.elastic.idle=0s", "memory.defrag.pages_per_step=8")
    device = DeviceQueue(engine)
    engine.submit(words(40, 1), 300)
    for turn in range(200):
        if turn % 20 == 0:
            fill(engine, 1000 + 50 * turn)
        elif turn % 20 == 10:
            make_holes(engine, turn)
            defrag(engine)
        engine.step()
    engine.finish()
    assert moved(engine) > 20
    assert device.decommits > 20


def test_moves_that_fail_end_the_run_and_change_nothing(kind: type[Harness]) -> None:
    engine = kind(*SMALL, *QUIET)
    stream = engine.submit(words(90, 1), 40)
    fill(engine, 10, count=20)
    engine.step(20)
    make_holes(engine, 1)
    engine.arm(moves="error")
    defrag(engine)
    engine.step(3)
    elastic = engine.engine.snapshot().elastic
    assert elastic.defrag_moved_pages == 0
    assert elastic.defrag_last_run is not None
    assert elastic.defrag_last_run["failed"]
    engine.arm(moves=None)
    defrag(engine)
    engine.finish()
    assert moved(engine) > 0
    assert engine.tokens(stream) == continuation(words(90, 1), 40)


def test_runs_begin_by_themselves_after_requests_and_above_the_limit() -> None:
    engine = Harness(*SMALL, "memory.defrag.every_requests=10", "memory.defrag.max_fragmentation=1")
    fill(engine, 10, count=40)
    engine.finish()
    make_holes(engine, 1)
    engine.time += 5.0
    fill(engine, 500, count=12)
    engine.finish()
    assert engine.engine.snapshot().elastic.defrag_runs["requests"]["completed"] >= 1
    engine = Harness(
        *SMALL, "memory.defrag.every_requests=0", "memory.defrag.max_fragmentation=20%"
    )
    fill(engine, 10, count=40)
    engine.finish()
    make_holes(engine, 1)
    assert engine.engine.pool.blocks.fragmentation > 0.2
    engine.time += 5.0
    engine.finish()
    snapshot = engine.engine.snapshot().elastic
    assert snapshot.defrag_runs["fragmentation"]["completed"] >= 1
    assert snapshot.fragmentation_ratio == 0
