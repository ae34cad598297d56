"""The elastic pool inside an engine: texts stay what they are while pages move and blocks go."""

import random

import pytest
from toy import Harness, continuation

from memd.engine.messages import PoolCommand
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
