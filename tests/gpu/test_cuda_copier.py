"""Copies between device and host are ordered by the device, not by luck (case C038)."""

import time
from collections.abc import Iterator

import pytest
import torch

from memd.pool.layout import KVLayout
from memd.pool.moves import Transfer
from memd.tiers.cuda import CudaHostCopier
from memd.types import PageId, SlotId, TransferId, TransferPath

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = torch.device("cuda", 0)
KIB = 2**10
NUM_PAGES = 64


def layout(page_bytes: int) -> KVLayout:
    """Eight pages a block, with 4 KiB left over."""
    return KVLayout(1, 1, page_bytes // 2 // 16 // 2, 2, 16, 8 * page_bytes + 4 * KIB)


@pytest.fixture(params=[16 * KIB, 256 * KIB, 2048 * KIB], ids=lambda size: f"{size // KIB}KiB")
def stand(request: pytest.FixtureRequest) -> "Iterator[Stand]":
    stand = Stand(layout(request.param))
    yield stand
    stand.copier.close()


class Stand:
    """A copier over an arena of its own, and a way to see each page."""

    def __init__(self, layout: KVLayout) -> None:
        from memd_kernels.triton.host_pages import copy_host_pages

        assert layout.page_bytes * 8 + 4 * KIB == layout.block_bytes
        self.layout = layout
        self.memory = torch.zeros(
            NUM_PAGES // 8 * layout.block_bytes, dtype=torch.uint8, device=DEVICE
        )
        self.copier = CudaHostCopier(copy_host_pages)
        self.copier.open(self.memory, layout, num_slots=2 * NUM_PAGES)
        self.serial = 0

    def page(self, page: int) -> torch.Tensor:
        start = self.layout.page_offset_bytes(PageId(page))
        return self.memory[start : start + self.layout.page_bytes]

    def transfers(self, path: TransferPath, pairs: list[tuple[int, int]]) -> list[Transfer]:
        self.serial += len(pairs)
        return [
            Transfer(TransferId(self.serial - index), path, PageId(page), SlotId(slot))
            for index, (page, slot) in enumerate(pairs)
        ]

    def wait(self, transfers: list[Transfer]) -> dict[TransferId, bool]:
        found: dict[TransferId, bool] = {}
        deadline = time.monotonic() + 20
        while len(found) < len(transfers):
            assert time.monotonic() < deadline
            found |= dict(self.copier.poll())
        assert found.keys() == {transfer.id for transfer in transfers}
        return found


def test_pages_come_back_as_they_left(stand: Stand) -> None:
    stand.memory.random_(0, 255)
    before = stand.memory.clone()
    order = torch.randperm(NUM_PAGES // 2).tolist()
    pairs = [(page, slot) for page, slot in zip(order, reversed(order), strict=True)]
    pairs += [(page, NUM_PAGES + page) for page in range(NUM_PAGES // 2, NUM_PAGES)]
    down = stand.transfers("d2h", pairs)
    stand.copier.start(down)
    assert all(stand.wait(down).values())
    stand.memory.zero_()
    up = stand.transfers("h2d", pairs)
    stand.copier.start(up)
    assert all(stand.wait(up).values())
    for page in range(NUM_PAGES):
        start = stand.layout.page_offset_bytes(PageId(page))
        assert torch.equal(stand.page(page), before[start : start + stand.layout.page_bytes])
    gaps = stand.memory.view(-1, stand.layout.block_bytes)[:, -4 * KIB :]
    assert not gaps.any()


def test_copies_follow_the_steps_enqueued_before_them(stand: Stand) -> None:
    """Demoted while the step that writes them sleeps, restored while a step that reads sleeps.

    By the copy engine and, where pages are small, by the kernel, on the same slots.
    """
    for turn in range(170):
        num_pages = 8 if turn % 3 else 1
        pages = [(turn * 3 + index * 2) % NUM_PAGES for index in range(num_pages)]
        pairs = [(page, (page * 7 + turn) % (2 * NUM_PAGES)) for page in pages]
        torch.cuda._sleep(1_000_000)  # half a millisecond
        for page in pages:
            stand.page(page).fill_((turn + page) % 250)
        down = stand.transfers("d2h", pairs)
        stand.copier.start(down)
        assert all(stand.wait(down).values())
        for page in pages:
            stand.page(page).fill_(251)
        torch.cuda._sleep(1_000_000)
        read_before = [stand.page(page).clone() for page in pages]
        up = stand.transfers("h2d", pairs)
        stand.copier.start(up)
        assert all(stand.wait(up).values())
        wrong = torch.stack(
            [(stand.page(page) != (turn + page) % 250).sum() for page in pages]
            + [(content != 251).sum() for content in read_before]
        )
        assert not wrong.any(), (turn, wrong.tolist())


def test_what_cannot_be_copied_is_reported(stand: Stand) -> None:
    bad = stand.transfers("d2h", [(0, 10_000)])
    good = stand.transfers("d2h", [(1, 1)])
    stand.copier.start([*bad, *good])
    found = stand.wait([*bad, *good])
    assert found == {bad[0].id: False, good[0].id: True}
