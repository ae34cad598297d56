"""Host memory pinned chunk by chunk, and neighbours copied as one."""

import threading
import time

import pytest

from memd.pool.layout import KVLayout
from memd.pool.moves import Transfer
from memd.tiers.cuda import merge
from memd.tiers.pinned import PinnedRegion, SlotLayout
from memd.types import PageId, SlotId, TransferId

MIB = 2**20
SLOTS = SlotLayout(page_bytes=3 * MIB, num_slots=10, target_chunk_bytes=7 * MIB)


def wait_for(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_slots_lie_in_whole_chunks() -> None:
    assert SLOTS.slots_per_chunk == 2
    assert SLOTS.chunk_bytes == 6 * MIB
    assert SLOTS.num_chunks == 5
    assert SLOTS.size_bytes == 30 * MIB
    starts = [SLOTS.offset_bytes(SlotId(slot)) for slot in range(10)]
    assert starts == [slot * 3 * MIB for slot in range(10)]


@pytest.mark.parametrize("page_bytes", [48, 4096, 96 * 1024, 5 * MIB, 100 * MIB])
@pytest.mark.parametrize("num_slots", [1, 7, 5000])
def test_no_slot_crosses_a_chunk(page_bytes: int, num_slots: int) -> None:
    slots = SlotLayout(page_bytes, num_slots)
    ends = 0
    for slot in map(SlotId, range(num_slots)):
        start = slots.offset_bytes(slot)
        assert start >= ends
        ends = start + page_bytes
        assert start // slots.chunk_bytes == (ends - 1) // slots.chunk_bytes == slots.chunk_of(slot)
    assert ends <= slots.size_bytes


def test_chunks_are_pinned_in_order_and_one_ahead() -> None:
    pinned: list[tuple[int, int]] = []
    released: list[int] = []
    region = PinnedRegion(SLOTS, lambda *chunk: pinned.append(chunk), released.append)
    base = region.open().data_ptr()
    assert pinned == []
    assert not region.want(SlotId(3))
    wait_for(lambda: region.pinned_chunks == 3)
    assert region.want(SlotId(3))
    assert not region.want(SlotId(9))
    wait_for(lambda: region.pinned_chunks == 5)
    assert region.want(SlotId(9))
    region.close()
    starts = [base + chunk * 6 * MIB for chunk in range(5)]
    assert pinned == [(start, 6 * MIB) for start in starts]
    assert released == starts


def test_pinning_ends_with_the_first_failure() -> None:
    pinned: list[int] = []

    def register(address: int, size_bytes: int) -> None:
        if len(pinned) == 1:
            raise RuntimeError("no more")
        pinned.append(address)

    released: list[int] = []
    region = PinnedRegion(SLOTS, register, released.append)
    region.open()
    region.want(SlotId(9))
    wait_for(lambda: region.failed)
    assert region.want(SlotId(1))
    assert not region.want(SlotId(2))
    region.close()
    assert released == pinned


def test_closing_does_not_wait_for_chunks_nobody_needs() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def register(address: int, size_bytes: int) -> None:
        begun.set()
        assert go_on.wait(10)

    released: list[int] = []
    region = PinnedRegion(SLOTS, register, released.append)
    region.open()
    region.want(SlotId(9))
    assert begun.wait(10)
    closing = threading.Thread(target=region.close)
    closing.start()
    go_on.set()
    closing.join(10)
    assert not closing.is_alive()
    assert len(released) <= 2


def test_neighbours_on_both_sides_are_one_copy() -> None:
    # Blocks of 4 pages of 256 bytes with 32 bytes left over; chunks of 6 slots.
    layout = KVLayout(1, 1, 8, 4, 4, 4 * 256 + 32)
    slots = SlotLayout(layout.page_bytes, 60, target_chunk_bytes=6 * layout.page_bytes)
    pairs = [(9, 12), (0, 1), (1, 2), (2, 3), (3, 5), (4, 6), (5, 7), (8, 11), (10, 13), (12, 40)]
    transfers = [
        Transfer(TransferId(100 + page), "d2h", PageId(page), SlotId(slot)) for page, slot in pairs
    ]
    runs = merge(transfers, layout, slots)
    # Apart: 3 from 2 (slots), 4 from 3 (block), 9 from 8 (chunk).
    assert [[transfer.page for transfer in run.transfers] for run in runs] == [
        [0, 1, 2],
        [3],
        [4, 5],
        [8],
        [9, 10],
        [12],
    ]
    for run in runs:
        first = run.transfers[0]
        assert run.device_offset == layout.page_offset_bytes(first.page)
        assert run.host_offset == slots.offset_bytes(first.slot)
        assert run.size_bytes == len(run.transfers) * layout.page_bytes
    assert merge([], layout, slots) == []


def test_packed_pages_are_copies_of_their_own_with_their_size() -> None:
    # Blocks of 4 full pages of 256 bytes, or 10 packed ones of 96.
    layout = KVLayout(1, 1, 8, 4, 4, 4 * 256, packed_page_bytes=96)
    slots = SlotLayout(layout.page_bytes, 60)
    full, packed = [(0, 3), (1, 4)], [(10, 5), (11, 6), (19, 7)]
    transfers = [
        Transfer(TransferId(page), "d2h", PageId(page), SlotId(slot), (page, slot) in packed)
        for page, slot in [*full, *packed]
    ]
    runs = merge(transfers, layout, slots)
    assert [(run.device_offset, run.host_offset, run.size_bytes) for run in runs] == [
        (0, slots.offset_bytes(SlotId(3)), 2 * 256),
        (1024, slots.offset_bytes(SlotId(5)), 96),
        (1024 + 96, slots.offset_bytes(SlotId(6)), 96),
        (1024 + 9 * 96, slots.offset_bytes(SlotId(7)), 96),
    ]


def test_changes_are_told_once() -> None:
    region = PinnedRegion(SLOTS, lambda *chunk: None, lambda address: None)
    region.open()
    assert not region.changed()
    region.want(SlotId(0))
    wait_for(lambda: region.pinned_chunks == 2)
    assert region.changed()
    assert not region.changed()
    assert not region.want(SlotId(10_000))  # no such slot: pinning ends with the last one
    wait_for(lambda: region.pinned_chunks == 5)
    region.close()
