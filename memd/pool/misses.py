"""Why a prompt was found no further than it was. Pure; asked once for each, at its start."""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memd.pool.sequence import PrefixMatch
from memd.types import MissReason, PrefixMiss

if TYPE_CHECKING:
    from memd.pool.pool import Pool

_NAMESPACES_TRIED = 100  # by each prompt that misses; one that shares nothing costs one look


def miss_of(
    pool: "Pool",
    tokens: "array[int]",
    namespace: str,
    match: PrefixMatch,
    cached_tokens: int,
    keys: Sequence[bytes],
) -> PrefixMiss | None:
    """What of a prompt was not there; None where only its last token is computed, as always.

    Args:
        pool: Before it learns of the prompt.
        tokens: Of the prompt.
        namespace: What it may share with.
        match: What is used of it, before room was made for the rest.
        cached_tokens: Tokens that need not be computed.
        keys: Of the full pages it is about to compute, in order.
    """
    missed = len(tokens) - 1 - cached_tokens  # the last token is always computed
    if missed <= 0:
        return None
    ages = [pool.ghosts.age(key, pool.now()) for key in keys]
    evicted = [age is not None and age <= pool.regret_window_seconds for age in ages]
    page_tokens = pool.layout.page_tokens
    reason: MissReason
    if max(match.num_tokens, _held(pool, tokens, namespace)) > cached_tokens:
        reason = "unusable"
    elif evicted and evicted[0]:
        reason = "evicted"
    elif elsewhere(pool, tokens, namespace, _NAMESPACES_TRIED) > cached_tokens:
        reason = "isolated"
    else:
        reason = "differs" if goes_on(pool, match, namespace) else "unseen"
    return PrefixMiss(missed, min(missed, sum(evicted) * page_tokens), cached_tokens, reason)


def goes_on(pool: "Pool", match: PrefixMatch, namespace: str) -> bool:
    """Whether anything is cached behind the end of a match; it differs from what was asked for."""
    end = match.nodes[-1] if match.nodes else pool.tree.root(namespace)
    return any(child.end > match.tail_tokens for child in pool.tree.each_page_child(end))


def elsewhere(pool: "Pool", tokens: "array[int]", namespace: str, most_namespaces: int) -> int:
    """Most tokens of a prompt that another namespace holds; nothing of them can be used."""
    others = [other for other in pool.tree.namespaces() if other != namespace]
    return max((_held(pool, tokens, other) for other in others[:most_namespaces]), default=0)


def _held(pool: "Pool", tokens: "array[int]", namespace: str) -> int:
    """Tokens of a prompt that a namespace holds, on whatever tier."""
    found = pool.tree.match(namespace, tokens.tobytes()[: -tokens.itemsize])
    return len(found.nodes) * pool.layout.page_tokens + found.tail_tokens
