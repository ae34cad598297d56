"""The thread that copies pages between the arena and host memory."""

import time

import torch

from memd.pool.layout import KVLayout
from memd.pool.moves import Transfer
from memd.tiers.host import HostCopier
from memd.types import PageId, SlotId, TransferId

LAYOUT = KVLayout(2, 1, 8, 4, 16, 8192)


def ended(copier: HostCopier, count: int) -> dict[int, bool]:
    found: dict[int, bool] = {}
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        found |= dict(copier.poll())
        time.sleep(0.001)
    return found


def test_pages_come_back_as_they_left() -> None:
    device = torch.randint(0, 255, (4 * LAYOUT.block_bytes,), dtype=torch.uint8)
    before = device.clone()
    copier = HostCopier()
    copier.open(device, LAYOUT, num_slots=8)
    down = [Transfer(TransferId(page), "d2h", PageId(page), SlotId(7 - page)) for page in range(4)]
    copier.start(down)
    assert ended(copier, 4) == dict.fromkeys(range(4), True)
    device.zero_()
    up = [
        Transfer(TransferId(10 + page), "h2d", PageId(page), SlotId(7 - page)) for page in range(4)
    ]
    copier.start(up)
    assert ended(copier, 4) == dict.fromkeys(range(10, 14), True)
    for page in range(4):
        start = LAYOUT.page_offset_bytes(PageId(page))
        end = start + LAYOUT.page_bytes
        assert torch.equal(device[start:end], before[start:end])
    copier.close()


def test_packed_pages_come_back_to_other_places_and_touch_nothing_else() -> None:
    layout = KVLayout(2, 1, 8, 4, 16, 8192, packed_page_bytes=768)
    block = 1  # of packed pages, between two of full ones
    device = torch.randint(0, 255, (3 * layout.block_bytes,), dtype=torch.uint8)
    before = device.clone()
    copier = HostCopier()
    copier.open(device, layout, num_slots=8)
    first = block * layout.slots_per_block
    sources = [PageId(first + index) for index in (0, 3, 9)]
    targets = [PageId(first + index) for index in (1, 5, 2)]
    copier.start(
        [
            Transfer(TransferId(index), "d2h", page, SlotId(index), packed=True)
            for index, page in enumerate(sources)
        ]
    )
    assert ended(copier, 3) == dict.fromkeys(range(3), True)
    copier.start(
        [
            Transfer(TransferId(10 + index), "h2d", page, SlotId(index), packed=True)
            for index, page in enumerate(targets)
        ]
    )
    assert ended(copier, 3) == dict.fromkeys(range(10, 13), True)
    copier.close()
    expected = before.clone()
    for source, target in zip(sources, targets, strict=True):
        start, end = (layout.page_offset_bytes(page, packed=True) for page in (source, target))
        expected[end : end + 768] = before[start : start + 768]
    assert torch.equal(device, expected)


def test_a_copy_that_cannot_be_made_is_reported_as_failed() -> None:
    copier = HostCopier()
    copier.open(torch.zeros(LAYOUT.block_bytes, dtype=torch.uint8), LAYOUT, num_slots=2)
    copier.start([Transfer(TransferId(1), "d2h", PageId(0), SlotId(99))])
    assert ended(copier, 1) == {1: False}
    copier.start([Transfer(TransferId(2), "d2h", PageId(0), SlotId(1))])
    assert ended(copier, 1) == {2: True}
    copier.close()
