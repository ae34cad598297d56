"""Sequences with a common beginning are found by their page tables."""

from array import array
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from memd.engine.messages import SamplingParams, Submit
from memd.engine.plan import Chunk
from memd.engine.prefix_groups import MAX_GROUPS, PrefixGroup, PrefixGrouper
from memd.engine.request import Request
from memd.pool.prefix_tree import Node
from memd.pool.sequence import PoolSequence
from memd.types import PageId, RequestId

PAGE_TOKENS = 64


def chunk(name: int, pages: list[int]) -> Chunk:
    message = Submit(str(name), [1], SamplingParams(seed=0, max_tokens=4))
    request = Request.from_message(message, "", name, 0.0)
    held = [PageId(page) for page in pages]
    request.sequence = PoolSequence(
        RequestId(str(name)), "", array("i"), held, Node.__new__(Node), 0, 0
    )
    return Chunk(request, 0, 1, samples=True)


def grouper(chunks: list[Chunk]) -> PrefixGrouper:
    counts = Counter(page for each in chunks for page in each.request.sequence.pages)  # type: ignore[union-attr]
    refs = [counts[PageId(page)] for page in range(max(counts, default=0) + 1)]
    return PrefixGrouper(refs, PAGE_TOKENS)


def test_a_common_system_prompt_is_one_group() -> None:
    prompt = list(range(100))
    alone = chunk(0, [900, 901])
    sharing = [chunk(n, [*prompt, 1000 + n]) for n in range(1, 5)]
    order = [sharing[0], alone, *sharing[1:]]
    rows, groups = grouper(order).group(order)
    assert groups == [PrefixGroup(0, 4, 100)]
    assert rows[4:] == [alone]
    assert {id(row) for row in rows[:4]} == {id(each) for each in sharing}


def test_little_in_common_is_not_worth_it() -> None:
    chunks = [chunk(n, [7, 100 + n]) for n in range(4)]
    rows, groups = grouper(chunks).group(chunks)
    assert (rows, groups) == (chunks, [])


def test_groups_are_found_anew_when_a_sequence_joins() -> None:
    chunks = [chunk(n, [*range(80), 1000 + n]) for n in range(3)]
    found = grouper(chunks)
    assert found.group(chunks)[1] == [PrefixGroup(0, 3, 80)]
    assert found.group(chunks[:2])[1] == [PrefixGroup(0, 2, 80)]


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Page tables of a tree: a page has one predecessor."""
    tables: list[list[int]] = []
    free = iter(range(10**6))
    for _ in range(draw(st.integers(1, 12))):
        start: list[int] = []
        if tables and draw(st.booleans()):
            other = draw(st.sampled_from(tables))
            start = other[: draw(st.integers(0, len(other) - 1))]
        tables.append(start + [next(free) for _ in range(draw(st.integers(1, 90)))])
    return tables


@given(forests())
def test_a_group_shares_what_it_says(tables: list[list[int]]) -> None:
    chunks = [chunk(n, pages) for n, pages in enumerate(tables)]
    rows, groups = grouper(chunks).group(chunks)
    assert sorted(map(id, rows)) == sorted(map(id, chunks))
    assert len(groups) <= MAX_GROUPS
    taken: set[int] = set()
    for group in groups:
        members = range(group.first_row, group.first_row + group.num_rows)
        assert group.num_rows > 1
        assert not taken & set(members)
        taken |= set(members)
        prefixes = {tuple(rows[row].request.sequence.pages[: group.num_pages]) for row in members}  # type: ignore[union-attr]
        assert len(prefixes) == 1
        assert len(prefixes.pop()) == group.num_pages
        for row in members:  # longer than what it shares
            assert len(rows[row].request.sequence.pages) > group.num_pages  # type: ignore[union-attr]
