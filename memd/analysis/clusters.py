"""Which heads are put together: average linkage under a limit of size. Pure Python."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations

Cluster = tuple[int, ...]  # heads, ascending
Similarity = Sequence[Sequence[float]]  # [heads][heads], symmetric


def cluster(
    similarity: Similarity,
    count: int = 1,
    threshold: float = float("-inf"),
    largest: int | None = None,
) -> list[Cluster]:
    """Merge the two most similar clusters, again and again.

    A merge that would make it impossible to end with `count` clusters of at most `largest` heads is
    passed over, so without a threshold there are always exactly `count`.

    Args:
        similarity: Of each pair of heads.
        count: How many clusters are wanted; merging stops there.
        threshold: Clusters that are less similar are not merged, so there may be more.
        largest: Heads in a cluster at most; None: any number.

    Returns:
        Clusters in the order of their first heads.

    Source:
        Average linkage (Sokal and Michener 1958), updated as Lance and Williams (1967) do.
    """
    heads = len(similarity)
    room = heads if largest is None else largest
    linkage = {pair: similarity[pair[0]][pair[1]] for pair in combinations(range(heads), 2)}
    members: dict[int, Cluster] = {head: (head,) for head in range(heads)}  # by its first head
    while len(members) > count:
        for first, second in sorted(linkage, key=lambda pair: (-linkage[pair], pair)):
            rest = [len(each) for name, each in members.items() if name not in (first, second)]
            merged = len(members[first]) + len(members[second])
            if linkage[first, second] < threshold or can_become([*rest, merged], count, room):
                break
        if linkage[first, second] < threshold:
            break
        _merge(members, linkage, first, second)
    return [members[name] for name in sorted(members)]


def _merge(
    members: dict[int, Cluster], linkage: dict[tuple[int, int], float], first: int, second: int
) -> None:
    weights = len(members[first]), len(members[second])
    for other in members.keys() - {first, second}:
        near, far = _pair(first, other), _pair(second, other)
        total = weights[0] * linkage[near] + weights[1] * linkage.pop(far)
        linkage[near] = total / sum(weights)
    del linkage[first, second]
    members[first] = tuple(sorted(members[first] + members.pop(second)))


def _pair(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)


def can_become(sizes: Sequence[int], count: int, room: int) -> bool:
    """Whether clusters of these sizes can be merged to at most `count` of at most `room` heads."""
    return _fit(tuple(sorted(sizes, reverse=True)), (room,) * count)


@cache
def _fit(sizes: tuple[int, ...], rooms: tuple[int, ...]) -> bool:
    """Whether sizes, largest first, fit into rooms, in ascending order."""
    if not sizes:
        return True
    if sum(sizes) > sum(rooms):
        return False
    if sizes[0] == 1:
        return True
    for at, room in enumerate(rooms):
        if room >= sizes[0] and (at == 0 or rooms[at - 1] != room):
            left = tuple(sorted((*rooms[:at], room - sizes[0], *rooms[at + 1 :])))
            if _fit(sizes[1:], left):
                return True
    return False


def mean_similarity(similarity: Similarity, members: Cluster) -> float:
    """Over the pairs of a cluster; 1 for a single head."""
    pairs = list(combinations(members, 2))
    return sum(similarity[one][other] for one, other in pairs) / len(pairs) if pairs else 1.0
