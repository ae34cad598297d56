"""Which heads are put together, on similarities made by hand and at random."""

import random
from itertools import combinations

import pytest

from memd.analysis.clusters import can_become, cluster, mean_similarity


def table(heads, **pairs):
    """1 with itself, 0.1 with others, but for named pairs such as a_c=0.9."""
    rows = [[1.0 if a == b else 0.1 for b in range(heads)] for a in range(heads)]
    for name, value in pairs.items():
        one, other = ("abcdefgh".index(letter) for letter in name.split("_"))
        rows[one][other] = rows[other][one] = value
    return rows


def test_the_most_similar_are_merged_first_and_linkage_is_the_average():
    similar = table(4, a_c=0.9, b_d=0.7, a_b=0.8)
    assert cluster(similar, 3) == [(0, 2), (1,), (3,)]
    # To {a, c} the head b has (0.8 + 0.1) / 2, less than to d.
    assert cluster(similar, 2) == [(0, 2), (1, 3)]
    assert cluster(similar, 1) == [(0, 1, 2, 3)]


def test_the_threshold_ends_merging():
    similar = table(4, a_c=0.9, b_d=0.7)
    assert cluster(similar, threshold=0.8) == [(0, 2), (1,), (3,)]
    assert cluster(similar, threshold=0.95) == [(0,), (1,), (2,), (3,)]
    assert cluster(table(1), threshold=0.5) == [(0,)]


def test_no_cluster_is_larger_than_allowed_and_the_number_is_reached():
    similar = table(6, a_b=0.9, b_c=0.9, a_c=0.9, c_d=0.8, a_d=0.8, b_d=0.8)
    assert cluster(similar, 3, largest=2) == [(0, 1), (2, 3), (4, 5)]
    assert [len(each) for each in cluster(similar, 2, largest=3)] == [3, 3]


@pytest.mark.parametrize("seed", range(8))
def test_every_number_of_even_clusters_is_reached_from_any_similarity(seed):
    chance = random.Random(seed)
    heads = chance.choice((2, 3, 5, 8, 12, 16, 20))
    similar = table(heads)
    for one, other in combinations(range(heads), 2):
        similar[one][other] = similar[other][one] = chance.random()
    for count in range(1, heads + 1):
        largest = -(-heads // count)
        found = cluster(similar, count, largest=largest)
        assert len(found) == count
        assert max(map(len, found)) <= largest
        assert sorted(head for each in found for head in each) == list(range(heads))


@pytest.mark.parametrize(
    ("sizes", "count", "room", "fine"),
    [
        ([2, 2, 2], 2, 3, False),
        ([2, 2, 1, 1], 2, 3, True),
        ([4, 1], 2, 3, False),
        ([3, 3, 2, 2, 2], 3, 4, False),
        ([3, 3, 2, 2, 2], 3, 5, True),
        ([], 1, 1, True),
    ],
)
def test_whether_sizes_can_become_clusters(sizes, count, room, fine):
    assert can_become(sizes, count, room) is fine


def test_a_head_alone_is_like_itself():
    assert mean_similarity(table(3), (1,)) == 1.0
    assert mean_similarity(table(3, a_b=0.7), (0, 1, 2)) == pytest.approx(0.3)
