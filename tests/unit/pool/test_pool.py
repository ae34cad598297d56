"""The pool's door: sharing, eviction order, copy on write, accounting."""

from array import array

import pytest

from memd.errors import OutOfDeviceMemory, PoolExhausted
from memd.pool.audit import audit, check
from memd.pool.layout import KVLayout
from memd.pool.pool import Pool
from memd.pool.sequence import PoolSequence
from memd.pool.watermarks import Watermarks
from memd.types import BlockId, RequestId

PAGE_TOKENS = 16


class Backing:
    """Block memory with a number of blocks the device can still give."""

    def __init__(self, blocks: int = 10**6) -> None:
        self.blocks_left = blocks

    def commit(self, block: BlockId) -> None:
        if not self.blocks_left:
            raise OutOfDeviceMemory("none left")
        self.blocks_left -= 1

    def settle(self) -> None:
        pass

    def decommit(self, block: BlockId) -> None:
        self.blocks_left += 1


class Driver:
    """Runs sequences through a pool as the engine does."""

    def __init__(self, capacity: int = 64, backing: Backing | None = None) -> None:
        self.time = 0.0
        layout = KVLayout(1, 1, 1, 1, PAGE_TOKENS, 4 * PAGE_TOKENS * 2)
        self.backing = backing or Backing()
        self.pool = Pool(layout, capacity, self.backing, Watermarks(0.9, 0.7), lambda: self.time)
        self.serial = 0

    def admit(
        self, tokens: list[int], salt: str = "", reserve: int = 0
    ) -> tuple[PoolSequence, int]:
        self.serial += 1
        data = array("i", tokens)
        match = self.pool.match(data, salt)
        return self.pool.admit(RequestId(str(self.serial)), data, salt, match, reserve)

    def serve(self, tokens: list[int], salt: str = "") -> int:
        """A request from start to end; returns its cached tokens."""
        sequence, cached = self.admit(tokens, salt)
        self.pool.copied(sequence)
        self.pool.release(sequence, len(tokens))
        assert check(self.pool) == []
        return cached


def tokens(count: int, seed: int = 0) -> list[int]:
    return [seed * 100_000 + index for index in range(count)]


@pytest.mark.parametrize("length", [2, 15, 16, 17, 31, 32, 33, 512])
def test_a_repeated_prompt_hits_all_but_its_last_token(length: int) -> None:
    driver = Driver()
    assert driver.serve(tokens(length)) == 0
    assert driver.serve(tokens(length)) == length - 1


@pytest.mark.parametrize("shared", [1, 15, 16, 17, 299, 300, 301, 511])
def test_a_common_beginning_is_shared_to_the_token(shared: int) -> None:
    driver = Driver()
    driver.serve(tokens(512))
    assert driver.serve(tokens(shared) + tokens(200, seed=1)) == shared


def test_many_prompts_that_part_within_one_page() -> None:
    driver = Driver(capacity=400)
    for length in range(1, 40):
        driver.serve(tokens(length) + tokens(5, seed=length))
    for length in range(1, 40):
        assert driver.serve(tokens(length) + tokens(5, seed=length)) == length + 4
        assert driver.serve([*tokens(length), 999_999, 5]) == length


def test_namespaces_share_nothing() -> None:
    driver = Driver()
    driver.serve(tokens(100), "a")
    assert driver.serve(tokens(100), "b") == 0
    assert driver.serve(tokens(100), "a") == 99


def test_a_running_sequence_is_shared_after_its_pages_are_published() -> None:
    driver = Driver()
    first, _ = driver.admit(tokens(100))
    assert driver.pool.match(array("i", tokens(100)), "").awaited
    driver.pool.publish(first, 64)
    second, cached = driver.admit(tokens(100))
    assert cached == 64
    assert second.pages[:4] == first.pages[:4]
    assert driver.pool.pages.shared == 4
    driver.pool.publish(first, 100)
    driver.pool.publish(second, 100)
    assert second.rewritten == [4, 5]
    assert second.pages[:6] == first.pages[:6]
    assert check(driver.pool) == []


def test_equal_pages_of_two_sequences_become_one() -> None:
    driver = Driver()
    first, _ = driver.admit(tokens(32))
    second, _ = driver.admit(tokens(32))
    own = list(second.pages)
    driver.pool.publish(first, 32)
    driver.pool.publish(second, 32)
    assert second.rewritten == [0, 1]
    assert second.pages == first.pages
    assert not set(own) & set(first.pages)
    assert driver.pool.pages.active == 2
    driver.pool.release(first, 32)
    driver.pool.release(second, 32)
    assert check(driver.pool) == []


def test_part_filled_pages_go_first() -> None:
    """Tail pages of short prompts never push out a long prefix (case C034)."""
    driver = Driver()
    driver.serve(tokens(320))
    for seed in range(1, 61):
        driver.pool.reclaim(100)
        driver.serve(tokens(13, seed=seed))
    assert driver.serve(tokens(320)) >= 304


def test_least_recently_used_goes_first_and_leaves_before_parents() -> None:
    driver = Driver(capacity=12)
    driver.serve(tokens(64, seed=1))
    driver.serve(tokens(64, seed=2))
    driver.serve(tokens(64, seed=1))
    driver.pool.evict(4)
    assert driver.pool.match(array("i", tokens(64, seed=2)), "").num_tokens == 0
    assert driver.pool.match(array("i", tokens(64, seed=1)), "").num_tokens == 63
    driver.pool.evict(1)
    assert driver.pool.match(array("i", tokens(64, seed=1)), "").num_tokens == 48


def test_a_chat_that_goes_on_replaces_its_own_tail() -> None:
    driver = Driver()
    driver.serve(tokens(20))
    for length in range(24, 65, 4):
        assert driver.serve(tokens(length)) == length - 4
    assert driver.pool.pages.cached == 4


def test_a_prompt_as_large_as_the_pool_that_is_cached_still_fits() -> None:
    driver = Driver(capacity=4)
    driver.serve(tokens(64))
    assert driver.serve(tokens(64)) == 48  # no page is left for a copy of the fourth


def test_admission_keeps_the_reserve_obtainable() -> None:
    driver = Driver(capacity=8)
    with pytest.raises(PoolExhausted, match="4 in reserve"):
        driver.admit(tokens(80), reserve=4)
    driver.admit(tokens(80), reserve=3)
    assert driver.pool.obtainable_pages == 3


def test_the_source_of_a_copy_stays_until_the_copy_is_done() -> None:
    driver = Driver(capacity=8)
    driver.serve(tokens(24))
    sequence, cached = driver.admit([*tokens(20), 7, 7])
    assert cached == 20
    assert len(sequence.copies) == 1
    assert driver.pool.evict(8) == 0
    driver.pool.copied(sequence)
    assert driver.pool.evict(8) == 1
    assert check(driver.pool) == []


def test_a_device_without_memory_falls_back_on_cached_pages() -> None:
    driver = Driver(capacity=16, backing=Backing(blocks=1))
    driver.serve(tokens(64))
    assert driver.serve(tokens(48, seed=1)) == 0
    with pytest.raises(PoolExhausted, match="none left"):
        driver.admit(tokens(100, seed=2))
    assert check(driver.pool) == []
    assert driver.pool.pages.active == 0


def test_suspect_pages_are_quarantined_until_the_audit() -> None:
    driver = Driver(capacity=8)
    sequence, _ = driver.admit(tokens(64))
    driver.pool.publish(sequence, 32)
    driver.pool.release(sequence, 48, keep=False)
    assert driver.pool.pages.quarantined == 2
    assert driver.pool.match(array("i", tokens(64)), "").num_tokens == 32
    report = audit(driver.pool)
    assert report.problems == []
    assert report.released_quarantine_pages == 2
    assert driver.pool.free_pages == 6
    assert check(driver.pool) == []


def test_the_audit_finds_and_repairs_a_leak() -> None:
    driver = Driver(capacity=8)
    sequence, _ = driver.admit(tokens(40))
    del driver.pool.sequences[sequence.request_id]  # the pages are now held by nobody known
    driver.pool.announced.withdraw_rest(sequence)
    assert check(driver.pool) != []
    report = audit(driver.pool)
    assert report.leaked_pages == report.repaired_pages == 3
    assert check(driver.pool) == []
    assert driver.pool.free_pages == 8


def test_regret_and_the_reasons_of_misses() -> None:
    driver = Driver()
    driver.serve(tokens(64))
    driver.pool.evict(64)
    driver.time += 10
    driver.serve(tokens(64))
    counters = driver.pool.counters
    assert counters.regretted == 4
    assert counters.miss_tokens == {"cold": 63, "evicted": 63, "final": 2}
    driver.pool.evict(64)
    driver.time += 100  # past the regret window
    driver.serve(tokens(64))
    assert counters.regretted == 4
    assert counters.query_tokens == 192


def test_flush_gives_blocks_back() -> None:
    driver = Driver(capacity=64)
    driver.serve(tokens(512))
    running, _ = driver.admit(tokens(10, seed=3))
    assert driver.pool.blocks.committed_blocks == 9
    assert driver.pool.flush() == 32
    assert driver.pool.blocks.committed_blocks == 1
    driver.pool.release(running, 10)
    driver.pool.flush()
    assert driver.pool.blocks.committed_blocks == 0


def test_probing_changes_nothing() -> None:
    """Looking up renews nothing, so the evictor keeps finding victims (case C022)."""
    driver = Driver(capacity=16)
    driver.serve(tokens(64, seed=1))
    driver.serve(tokens(64, seed=2))
    order = driver.pool.lru.in_order()
    for _ in range(100):
        assert driver.pool.match(array("i", tokens(64, seed=1)), "").num_tokens == 63
    assert driver.pool.lru.in_order() == order
    for seed in range(3, 12):
        driver.serve(tokens(64, seed=seed))
    assert driver.pool.counters.allocations["failed"] == 0
