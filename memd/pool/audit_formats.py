"""Checks the formats of blocks and pages against each other."""

from typing import TYPE_CHECKING

from memd.pool.pages import PageState
from memd.types import PageId

if TYPE_CHECKING:
    from memd.pool.pool import Pool


def check_formats(pool: "Pool") -> list[str]:
    """Every contradiction, in words. Changes nothing."""
    blocks, problems = pool.blocks, []
    used: dict[int, list[int]] = {}  # by block: places in it
    for page, state in enumerate(pool.pages.state):
        if state != PageState.FREE:
            block, place = divmod(page, blocks.slots_per_block)
            used.setdefault(block, []).append(place)
    numbers = range(blocks.room_pages // blocks.slots_per_block)
    packed = {number for number in numbers if blocks.is_packed_block(number)}
    for block, places in used.items():
        room = blocks.packed_pages_per_block if block in packed else blocks.pages_per_block
        if not blocks.is_committed(block):
            problems.append(f"block {block} holds pages and has no memory")
        if max(places) >= room:
            problems.append(f"page {max(places)} of block {block} is beyond its {room} pages")
    problems += [f"block {block} is packed and holds nothing" for block in packed - used.keys()]
    in_packed = sum(len(places) for block, places in used.items() if block in packed)
    in_all = sum(map(len, used.values()))
    cached = sum(1 for page in pool.lru.in_order() if blocks.is_packed(page))
    counted = {
        "packed blocks": (blocks.packed_blocks, len(packed)),
        "packed pages": (blocks.packed_pages, in_packed),
        "full pages": (blocks.full_pages, in_all - in_packed),
        "cached packed pages": (pool.pages.cached_packed, cached),
        "empty blocks": (len(blocks.empty_since), blocks.committed_blocks - len(used)),
    }
    problems += [
        f"{name}: {kept} kept, {found} counted"
        for name, (kept, found) in counted.items()
        if kept != found
    ]
    return problems + _check_holders(pool)


def _check_holders(pool: "Pool") -> list[str]:
    """What sequences, copies and host slots know of formats is so."""
    blocks, moves = pool.blocks, pool.residency.moves
    problems = [
        f"{sequence.request_id}: {sequence.packed_pages} of its pages are packed as kept, "
        f"{blocks.count_packed(sequence.pages)} as counted"
        for sequence in pool.sequences.values()
        if sequence.packed_pages != blocks.count_packed(sequence.pages)
    ]
    problems += [
        f"{sequence.request_id}: page {page} is packed and still written, or not full"
        for sequence in pool.sequences.values()
        for page in sequence.pages
        if blocks.is_packed(page) and not _is_full(pool, page)
    ]
    for move in moves.values():
        transfer = move.transfer
        kept = transfer.packed, transfer.slot in pool.host.packed
        if kept != (blocks.is_packed(transfer.page),) * 2:
            problems.append(f"page {transfer.page} is copied in the wrong format")
    if pool.residency.moving_packed.keys() != {
        n for n, each in moves.items() if each.transfer.packed
    }:
        problems.append("packed pages that are being copied are not those that are noted")
    if not pool.host.packed <= pool.host.holders().keys():
        problems.append("a host slot counts as packed and holds nothing")
    return problems


def _is_full(pool: "Pool", page: PageId) -> bool:
    sealed = pool.pages.state[page] == PageState.SEALED
    return sealed and pool.pages.tokens[page] == pool.layout.page_tokens
