"""The pool's blocks for the operator, in columns: compact, and quick to make and to draw."""

from typing import Any

from memd.pool.pages import PageState
from memd.pool.pool import Pool

_SEALED = int(PageState.SEALED)
_FREE, _QUARANTINED = int(PageState.FREE), int(PageState.QUARANTINED)
MAX_VICTIMS = 10_000  # pages whose turn at eviction is told


def blocks(pool: Pool, offset: int, limit: int) -> dict[str, Any]:
    """Blocks `[offset, offset + limit)` in physical order, one list for each column.

    Columns: `packed` (it holds packed pages), pages by state (`active`, `cached`, `pinned`,
    `quarantined`, `free`), `shared_pages`, `sealed_tokens`, `references` of all pages together,
    `age_seconds` since a sequence let the last of its pages go (0: some are held; None: nothing is
    stored), `tenant` charged for most of its pages (index into `tenants`; None: nobody),
    `victim_rank` of its first page to be evicted (0: the very next; None: none of the next
    MAX_VICTIMS pages).
    """
    size = pool.blocks.slots_per_block
    numbers = range(
        min(offset, pool.blocks.num_blocks), min(offset + limit, pool.blocks.num_blocks)
    )
    columns: dict[str, list[Any]] = {"block": list(numbers)}
    columns["committed"] = [pool.blocks.is_committed(number) for number in numbers]
    columns["packed"] = [pool.blocks.is_packed_block(number) for number in numbers]
    ranks: dict[int, int] = {}
    for rank, page in enumerate(pool.residency.victims(MAX_VICTIMS)):
        ranks.setdefault(page // size, rank)
    state, now = pool.pages.state, pool.now()
    rows: list[tuple[Any, ...]] = []
    for number in numbers:
        first, count = number * size, pool.blocks.pages_in(number)
        if state.count(_FREE, first, first + count) == count:
            rows.append((0, 0, 0, 0, count, 0, 0, 0, None, None))
        else:
            rows.append(_block(pool, range(first, first + count), now))
    columns |= {name: [row[place] for row in rows] for place, name in enumerate(_COUNTS)}
    columns["victim_rank"] = [ranks.get(number) for number in numbers]
    return {
        "total": pool.blocks.num_blocks,
        "offset": offset,
        "tenants": pool.tenants.names,
        "columns": columns,
    }


_COUNTS = (
    "active",
    "cached",
    "pinned",
    "quarantined",
    "free",
    "shared_pages",
    "sealed_tokens",
    "references",
    "age_seconds",
    "tenant",
)


def _block(pool: Pool, pages: range, now: float) -> tuple[Any, ...]:
    """The values of `_COUNTS` for a block with pages in use. Slices: there may be 10,000 blocks."""
    part = slice(pages.start, pages.stop)
    state, refs = pool.pages.state[part], pool.pages.refs[part]
    free = state.count(_FREE)
    quarantined, sealed = state.count(_QUARANTINED), state.count(_SEALED)
    active = len(pages) - refs.count(0)
    pins = pool.pages.pins[part]
    pinned = 0
    if any(pins):
        pinned = sum(1 for pin, count in zip(pins, refs, strict=True) if pin and not count)
    tokens, owners = pool.pages.tokens[part], pool.pages.owner[part]
    if sealed < len(pages):
        tokens = [count for count, each in zip(tokens, state, strict=True) if each == _SEALED]
    age: float | None = 0.0
    if not active:
        used_at = pool.lru.last_used_at_of(pages)
        times = [time for time, each in zip(used_at, state, strict=True) if each == _SEALED]
        age = now - max(times) if times else None
    owner = owners[0]
    if free or owners.count(owner) < len(owners):
        taken = [number for number, each in zip(owners, state, strict=True) if each]
        owner = max(set(taken), key=taken.count)
    return (
        active,
        len(pages) - free - active - pinned - quarantined,
        pinned,
        quarantined,
        free,
        active - refs.count(1),
        sum(tokens),
        sum(refs),
        age,
        owner,
    )
