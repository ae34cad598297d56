"""Why a prompt is found no further: each reason, and how much of it was evicted."""

from array import array

import pytest
from pool_model import FakeBacking

from memd.pool.layout import KVLayout
from memd.pool.misses import goes_on
from memd.pool.pool import Pool
from memd.pool.prefix_tree import Node
from memd.pool.watermarks import Watermarks
from memd.types import PrefixMiss, RequestId

PAGE = 4


@pytest.fixture
def pool():
    layout = KVLayout(1, 1, 1, 1, PAGE, 4 * PAGE * 2)
    return Pool(layout, 16, FakeBacking(), Watermarks(1.0, 0.9), lambda: 50.0)


def ask(pool, tokens, namespace="ann", counted=True):
    """What is told of a prompt; it is computed, and stays cached."""
    name, data = RequestId(f"r{pool.counters.query_tokens}"), array("i", tokens)
    match = pool.match(data, namespace)
    sequence, _ = pool.admit(name, data, namespace, match, count_lookup=counted)
    pool.publish(sequence, len(tokens))
    pool.release(sequence, len(tokens))
    return sequence.miss


def test_a_prompt_that_nobody_has_seen(pool):
    assert ask(pool, range(10)) == PrefixMiss(9, 0, 0, "unseen")
    assert ask(pool, range(10)) is None, "only the last token is computed, as always"
    assert ask(pool, range(20)) == PrefixMiss(9, 0, 10, "unseen")


def test_prompts_that_part_at_a_token(pool):
    ask(pool, range(12))
    assert ask(pool, [*range(6), 99, 98, 97, 96]) == PrefixMiss(3, 0, 6, "differs")
    assert ask(pool, [77, *range(1, 12)]) == PrefixMiss(11, 0, 0, "differs")


def test_a_prompt_looks_at_few_of_those_that_are_cached(pool, monkeypatch):
    """There may be a hundred thousand of them, and each start would take as long."""
    for first in range(10):
        ask(pool, [100 * first, 1, 2, 3, 4])
    looked = []
    monkeypatch.setattr(Node, "is_fork", property(lambda node: looked.append(node)))
    match = pool.match(array("i", [7777, 1, 2]), "ann")
    assert goes_on(pool, match, "ann")
    assert len(looked) == 1


def test_what_was_evicted_is_told_apart(pool):
    ask(pool, range(12))
    pool.flush()
    assert ask(pool, range(12)) == PrefixMiss(11, 11, 0, "evicted")
    pool.flush()
    pool.regret_window_seconds = -1.0
    assert ask(pool, range(12)) == PrefixMiss(11, 0, 0, "unseen")


def test_what_another_salt_holds_cannot_be_used(pool):
    ask(pool, range(12), "bob")
    assert ask(pool, range(12), "ann") == PrefixMiss(11, 0, 0, "isolated")


def test_what_does_not_fit_beside_its_copy_is_given_up(pool):
    ask(pool, range(6))
    held = array("i", range(100, 160))
    sequence, _ = pool.admit(RequestId("held"), held, "x", pool.match(held, "x"))
    assert len(sequence.pages) == 15
    miss = ask(pool, [*range(3), 9])
    assert miss == PrefixMiss(3, 0, 0, "unusable")


def test_a_prompt_that_resumes_is_not_asked_again(pool):
    assert ask(pool, range(10), counted=False) is None
