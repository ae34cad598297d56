"""Plans of moves, who may not be moved, and runs."""

from array import array

import pytest
from pool_model import FakeBacking

from memd.errors import InvariantError
from memd.pool.audit import audit, check
from memd.pool.blocks import Blocks
from memd.pool.defrag import PageMove, plan_moves
from memd.pool.defragmenter import Defragmenter
from memd.pool.layout import KVLayout
from memd.pool.pool import Pool
from memd.pool.sequence import PoolSequence
from memd.pool.watermarks import Watermarks
from memd.types import PageId, RequestId

PAGE_TOKENS = 4
PER_BLOCK = 4


def blocks_with(*used: int) -> Blocks:
    """Blocks that hold so many pages each."""
    blocks = Blocks(len(used) * PER_BLOCK, PER_BLOCK, FakeBacking(), lambda: 0.0)
    blocks.take(len(used) * PER_BLOCK)
    for block, count in enumerate(used):
        blocks.put(PageId(block * PER_BLOCK + at) for at in range(count, PER_BLOCK))
    return blocks


def emptied(blocks: Blocks, moves: list[PageMove]) -> set[int]:
    left = {block: set(blocks.used_in(block)) for block in blocks.partly_used(True)}
    for move in moves:
        left[move.source // PER_BLOCK].remove(move.source)  # type: ignore[index]
        assert move.target in blocks.free_in(move.target // PER_BLOCK)  # type: ignore[arg-type]
    return {block for block, pages in left.items() if not pages}


@pytest.mark.parametrize(
    ("used", "fragmentation"),
    [
        ((), 0),
        ((0, 0), 0),
        ((1,), 0),
        ((4, 4, 1), 0),
        ((4, 1, 0, 0), 0),
        ((2, 2), 0.5),
        ((1, 1, 1, 1), 0.75),
        ((3, 3, 3), 0),
        ((3, 3, 2), 1 / 3),
    ],
)
def test_fragmentation_counts_blocks_that_moving_would_empty(
    used: tuple[int, ...], fragmentation: float
) -> None:
    blocks = blocks_with(*used)
    assert blocks.fragmentation == pytest.approx(fragmentation)
    moves = plan_moves(blocks, lambda page: True, 1000)
    assert len(emptied(blocks, moves)) == blocks.surplus_blocks
    assert bool(moves) == bool(fragmentation)


def test_moves_go_from_the_emptiest_blocks_into_the_fullest() -> None:
    blocks = blocks_with(1, 3, 2, 3, 4)
    moves = plan_moves(blocks, lambda page: True, 1000)
    assert {move.source // PER_BLOCK for move in moves} == {0}
    assert {move.target // PER_BLOCK for move in moves} <= {1, 3}


def test_a_block_with_a_page_that_must_stay_is_no_source() -> None:
    blocks = blocks_with(1, 3, 2, 3, 4)
    stays = blocks.used_in(0)[0]  # type: ignore[arg-type]
    moves = plan_moves(blocks, lambda page: page != stays, 1000)
    assert {move.source // PER_BLOCK for move in moves} == {2}
    assert plan_moves(blocks, lambda page: False, 1000) == []


def test_a_block_is_emptied_over_several_bounded_plans() -> None:
    blocks = blocks_with(3, 3, 3, 3)
    total = []
    for _ in range(3):
        (move,) = plan_moves(blocks, lambda page: True, 1)
        blocks.take_these([move.target])
        blocks.put([move.source])
        total.append(move.source // PER_BLOCK)
    assert len(set(total)) == 1
    assert blocks.surplus_blocks == 0
    assert plan_moves(blocks, lambda page: True, 1) == []


class Driver:
    """A pool of 4-token pages, and sequences in it."""

    def __init__(self, host_pages: int = 0) -> None:
        self.time = 0.0
        layout = KVLayout(1, 1, 1, 1, PAGE_TOKENS, PER_BLOCK * PAGE_TOKENS * 2)
        self.pool = Pool(
            layout, 32, FakeBacking(), Watermarks(1.0, 0.99), lambda: self.time, 60.0, host_pages
        )
        self.pool.host_limit_bytes = host_pages * layout.page_bytes
        self.serial = 0

    def admit(self, tokens: list[int]) -> PoolSequence:
        self.serial += 1
        data = array("i", tokens)
        match = self.pool.match(data, "")
        return self.pool.admit(RequestId(str(self.serial)), data, "", match)[0]

    def scatter(self) -> list[PoolSequence]:
        """Eight blocks of which each has one page in use, by a sequence of its own."""
        all_of_them = [self.admit([index * 10, 1, 2]) for index in range(32)]
        for index, sequence in enumerate(all_of_them):
            if index % PER_BLOCK:
                self.pool.release(sequence, 0)
        return all_of_them[::PER_BLOCK]


def test_every_reference_to_a_page_is_renamed_and_nothing_else() -> None:
    driver = Driver()
    pool = driver.pool
    pool.pins.limit_ratio = 1.0
    kept = driver.scatter()
    shared = [driver.admit([7] * 12) for _ in range(1)]
    pool.publish(shared[0], 12)
    shared.append(driver.admit([7] * 13))
    pool.pins.pin(shared[0].node, None, "")
    before = {id(each): list(each.pages) for each in (*kept, *shared)}
    order, cached = pool.lru.in_order(), pool.match(array("i", [7] * 13), "")
    moves = pool.relocator.plan(100)
    assert len(moves) > 4
    pool.relocate(moves)
    assert check(pool) == []
    renamed = {move.source: move.target for move in moves}
    for each in (*kept, *shared):
        assert each.pages == [renamed.get(page, page) for page in before[id(each)]]
        assert all(each.pages[at] in renamed.values() for at in each.rewritten)
    assert pool.lru.in_order() == [renamed.get(page, page) for page in order]
    assert pool.match(array("i", [7] * 13), "").num_tokens == cached.num_tokens == 12
    with pytest.raises(InvariantError, match="stale"):
        pool.admit(RequestId("late"), array("i", [7] * 13), "", cached)
    assert pool.blocks.fragmentation == 0


def sources(pool: Pool) -> set[PageId]:
    return {move.source for move in pool.relocator.plan(1000)}


def test_pages_that_somebody_outside_knows_by_number_are_not_moved() -> None:
    driver = Driver(host_pages=8)
    pool = driver.pool
    lone, *_ = driver.scatter()
    assert set(lone.pages) <= sources(pool)
    copying = driver.admit([99, 98, 97, 96, 95])
    pool.release(copying, 5)
    copier = driver.admit([99, 98, 97, 96, 95, 94])
    (copy,) = copier.copies
    busy = {copy.source, copy.target}
    assert not busy & sources(pool)
    pool.copied(copier)
    pool.claimed.extend(pool.match(array("i", [99, 98, 97, 96, 1]), "").nodes)
    assert pool.claimed.held
    assert not set(pool.claimed.held) & sources(pool)
    pool.claimed.release()
    pool.publish(copier, 4)
    pool.release(copier, 6)
    pool.residency.clean(8)
    assert pool.residency.leaving
    assert not pool.residency.leaving & sources(pool)
    failed = driver.admit([50, 51, 52])
    pool.release(failed, 3, keep=False)
    quarantined = {page for page, state in enumerate(pool.pages.state) if state == 3}
    assert quarantined
    assert not quarantined & sources(pool)


def test_a_leaked_page_stays_where_the_audit_finds_it() -> None:
    driver = Driver()
    lone, *_ = driver.scatter()
    driver.pool.pages.refs[lone.pages[0]] += 1
    driver.pool.pages.references += 1
    driver.pool.pages.shared += 1
    assert lone.pages[0] not in sources(driver.pool)
    with pytest.raises(InvariantError):
        driver.pool.relocate([PageMove(lone.pages[0], PageId(1))])
    assert audit(driver.pool).leaked_pages == 1
    assert check(driver.pool) == []


def test_a_run_ends_when_nothing_is_left_and_rests_before_the_next() -> None:
    driver = Driver()
    defragmenter = Defragmenter(driver.pool, lambda: driver.time)
    defragmenter.max_fragmentation = 0.5
    driver.scatter()
    for _ in range(100):
        moves = defragmenter.plan(None, idle=False)
        if not moves:
            break
        assert len(moves) == 1
        driver.pool.relocate(moves)
        defragmenter.moved(moves, 0.0, idle=False)
    assert defragmenter.runs["fragmentation", "completed"] == 1
    assert defragmenter.moved_pages == 6
    assert not defragmenter.running
    for sequence in list(driver.pool.sequences.values()):
        driver.pool.release(sequence, 0)
    driver.scatter()
    assert defragmenter.plan(None, idle=False) == [], "it rests"
    driver.time += 2.0
    assert len(defragmenter.plan(None, idle=True)) == 6, "nobody waits: more pages at once"


def test_requests_without_fragmentation_start_no_run() -> None:
    driver = Driver()
    defragmenter = Defragmenter(driver.pool, lambda: driver.time)
    defragmenter.every_requests = 3
    driver.admit([1, 2, 3])
    for _ in range(10):
        defragmenter.request_finished()
        driver.time += 10.0
        assert defragmenter.plan(None, idle=False) == []
    assert not any(defragmenter.runs.values())
