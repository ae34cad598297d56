"""Blocks in columns: right, and quick for a pool of 10,000 blocks."""

import time
from array import array

from pool_model import FakeBacking

from memd.pool.describe import blocks
from memd.pool.layout import KVLayout
from memd.pool.pool import Pool
from memd.pool.watermarks import Watermarks
from memd.types import RequestId

PAGE_TOKENS = 16
STATES = ("active", "cached", "pinned", "quarantined", "free")


def pool_of(num_blocks: int, pages_per_block: int) -> Pool:
    layout = KVLayout(1, 1, 1, 1, PAGE_TOKENS, pages_per_block * PAGE_TOKENS * 2)
    capacity = num_blocks * pages_per_block
    return Pool(layout, capacity, FakeBacking(), Watermarks(1.0, 0.9), lambda: 50.0)


def run(pool: Pool, name: str, num_tokens: int, tenant: str) -> None:
    """Leave a running sequence of that many tokens, all computed."""
    tokens = array("i", [hash((name, index)) % 10**6 for index in range(num_tokens)])
    sequence, _ = pool.admit(
        RequestId(name), tokens, tenant, pool.match(tokens, tenant), tenant=tenant
    )
    pool.publish(sequence, num_tokens)


def test_each_column_says_what_its_blocks_hold() -> None:
    pool = pool_of(4, 4)
    pool.pins.limit_ratio = 1.0
    run(pool, "cached", 64, "ann")
    pool.release(pool.sequences[RequestId("cached")], 64)
    run(pool, "pinned", 32, "bob")
    pool.pins.pin(pool.sequences[RequestId("pinned")].node, None, "")
    pool.release(pool.sequences[RequestId("pinned")], 32)
    run(pool, "active", 40, "bob")
    answer = blocks(pool, 0, 100)
    columns = answer["columns"]
    assert answer["total"] == len(columns["block"]) == 4
    totals = {state: sum(columns[state]) for state in STATES}
    assert totals == {"active": 3, "cached": 4, "pinned": 2, "quarantined": 0, "free": 7}
    assert sum(columns["sealed_tokens"]) == 64 + 32 + 32
    assert sum(columns["references"]) == 3
    names = [None if each is None else answer["tenants"][each] for each in columns["tenant"]]
    assert sorted(name or "" for name in names) == ["", "ann", "bob", "bob"]
    ranks = [rank for rank in columns["victim_rank"] if rank is not None]
    assert ranks == [0], "only cached pages are ever evicted"
    held = [
        age for age, active in zip(columns["age_seconds"], columns["active"], strict=True) if active
    ]
    assert set(held) == {0.0}
    part = blocks(pool, 2, 1)
    assert part["columns"]["cached"] == columns["cached"][2:3]


def test_10_000_blocks_take_well_under_a_second() -> None:
    pool = pool_of(10_000, 16)
    for index in range(20):
        run(pool, f"r{index}", 16 * 7000, ("ann", "bob")[index % 2])
        if index % 3:
            pool.release(pool.sequences[RequestId(f"r{index}")], 16 * 7000)
    started_at = time.process_time()
    answer = blocks(pool, 0, 10_000)
    took = time.process_time() - started_at
    assert len(answer["columns"]["block"]) == 10_000
    assert took < 0.5
