"""The disk tier's decisions, one at a time."""

from array import array

import pytest
from pool_model import FakeBacking

from memd.pool.audit import check
from memd.pool.disk_index import FILE_SYSTEM_BYTES, DiskIndex, folder_of
from memd.pool.files import FileReport, FileTransfer, IndexReport
from memd.pool.keys import page_key, root_key
from memd.pool.layout import KVLayout
from memd.pool.pool import Pool
from memd.pool.watermarks import Watermarks
from memd.types import RequestId

TOKENS = array("i", range(9))  # two pages and a token
KNOWN = "51fb1fd39005f225a65891cb84b3ab59a6b16239c46cabbd7e7e43d3ec647dd7"


@pytest.fixture
def pool() -> Pool:
    """Eight pages of four tokens, no host tier, a disk with four slots on the way to it."""
    layout = KVLayout(1, 1, 1, 1, 4, 64)
    pool = Pool(layout, 8, FakeBacking(), Watermarks(0.9, 0.5), lambda: 0.0, max_host_pages=8)
    pool.disk.open(100, 10**6, 4)
    pool.advance_disk([IndexReport(last=True)])
    return pool


def compute(pool: Pool) -> None:
    sequence, _ = pool.admit(RequestId("r"), TOKENS, "n", pool.match(TOKENS, "n"))
    pool.release(sequence, len(TOKENS))


def copies(pool: Pool) -> None:
    """All copies between device and host end well."""
    for transfer in pool.residency.take_orders():
        pool.finish_transfer(transfer.id, True)


def files(pool: Pool) -> list[FileTransfer]:
    pool.advance_disk([])
    return [each for each in pool.disk.take_orders() if isinstance(each, FileTransfer)]


def test_a_page_comes_up_although_its_write_ends_meanwhile(pool: Pool) -> None:
    compute(pool)
    pool.advance_disk([])
    copies(pool)
    writes = files(pool)
    assert [write.path for write in writes] == ["h2f", "h2f"]
    pool.evict(8)
    assert pool.pages.cached == 0
    match = pool.match(TOKENS, "n")
    pool.restore(match)
    assert len(pool.residency.arriving) == 2
    pool.advance_disk([FileReport(write.id) for write in writes])
    assert len(pool.residency.arriving) == 2
    assert check(pool) == []
    copies(pool)
    assert pool.match(TOKENS, "n").missing == []
    assert pool.counters.prefetched["cancelled"] == 0
    assert pool.host.used == 0
    assert check(pool) == []


def test_what_is_written_is_found_when_the_tree_has_forgotten(pool: Pool) -> None:
    compute(pool)
    pool.advance_disk([])
    copies(pool)
    pool.advance_disk([FileReport(write.id) for write in files(pool)])
    pool.evict(8)
    assert pool.tree.num_nodes == 0
    match = pool.match(TOKENS, "n")
    assert match.num_tokens == 8
    assert [file.tokens for file in match.files] == [
        TOKENS[:4].tobytes(),
        TOKENS[4:8].tobytes(),
    ]
    assert match.on_device(4).num_tokens == 0
    assert pool.match(TOKENS, "other").num_tokens == 0


def test_a_read_that_fails_is_a_miss(pool: Pool) -> None:
    test_what_is_written_is_found_when_the_tree_has_forgotten(pool)
    pool.restore(pool.match(TOKENS, "n"))
    first, second = files(pool)
    pool.advance_disk([FileReport(second.id), FileReport(first.id, bad="altered")])
    assert pool.match(TOKENS, "n").num_tokens == 0
    assert pool.tree.num_nodes == 0
    assert pool.host.used == 0
    assert pool.counters.disk_rejected["altered"] == 1
    assert check(pool) == []


def test_nothing_is_ordered_without_a_disk() -> None:
    layout = KVLayout(1, 1, 1, 1, 4, 64)
    pool = Pool(layout, 8, FakeBacking(), Watermarks(0.9, 0.5), lambda: 0.0)
    compute(pool)
    (node,) = pool.tree.page_children(pool.tree.root("n"))
    pool.drop_prefix(node)
    pool.flush()
    assert pool.disk.take_orders() == []
    assert not pool.disk.busy


def test_keys_follow_namespace_and_every_token() -> None:
    keys = {
        page_key(root_key(namespace), array("i", tokens).tobytes())
        for namespace in ("", "a", "b")
        for tokens in ((), (0,), (0, 0), (256,), (1,))
    }
    assert len(keys) == 15
    assert page_key(root_key("a"), b"1234").hex() == KNOWN, "files of former versions are lost"


def test_the_index_keeps_its_limit_and_the_order_of_use() -> None:
    index = DiskIndex(4000, 0)
    index.limit_bytes = 5 * index.page_bytes + (16 + 2) * FILE_SYSTEM_BYTES
    keys = [bytes([number * 16]) + bytes(31) for number in range(7)]
    assert len({folder_of(key) for key in keys}) == 7
    for key in keys[:5]:
        assert index.make_room(key, set()) == ()
        index.add(key, 0.0)
    assert index.capacity_pages() == 5
    assert not index.use(keys[0], 1.0)
    assert index.use(keys[0], 61.0)
    index.limit_bytes = index.used_bytes + FILE_SYSTEM_BYTES  # a new folder, and no file
    assert index.make_room(keys[5], {keys[1]}) == (keys[2],)
    index.add(keys[5], 0.0)
    assert index.make_room(keys[6], set(keys)) is None
