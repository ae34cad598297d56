"""The threads that read and write page files."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from memd.pool.files import (
    DiskReport,
    FileChanges,
    FileReport,
    FileTransfer,
    IndexReport,
    PageFile,
)
from memd.pool.keys import page_key, root_key
from memd.tiers.disk import DiskThreads
from memd.tiers.page_files import PageFiles
from memd.types import SlotId, TransferId

PAGE_TOKENS, PAGE_BYTES = 4, 1024


def page_file(number: int) -> PageFile:
    parent, tokens = root_key("n"), number.to_bytes(4, "little") * PAGE_TOKENS
    return PageFile(page_key(parent, tokens), parent, tokens)


class Slots:
    """Host slots, some of which have no memory yet."""

    def __init__(self) -> None:
        self.memory = torch.randint(0, 256, (8, PAGE_BYTES), dtype=torch.uint8)
        self.missing: set[int] = set()

    def __call__(self, slot: SlotId) -> torch.Tensor | None:
        return None if slot in self.missing else self.memory[slot]


def opened(path: Path) -> PageFiles:
    files = PageFiles(path, "n", PAGE_TOKENS, PAGE_BYTES)
    files.open()
    return files


def wait_for(disk: DiskThreads, done: Callable[[list[DiskReport]], bool]) -> list[DiskReport]:
    reports: list[DiskReport] = []
    deadline = time.monotonic() + 60
    while not done(reports):
        assert time.monotonic() < deadline, reports
        reports += disk.poll()
        time.sleep(0.001)
    return reports


def ended(count: int) -> Callable[[list[DiskReport]], bool]:
    return lambda reports: sum(isinstance(each, FileReport) for each in reports) >= count


def indexed(reports: list[DiskReport]) -> bool:
    return any(isinstance(each, IndexReport) and each.last for each in reports)


@pytest.fixture
def slots() -> Slots:
    return Slots()


@pytest.fixture
def disk(tmp_path: Path, slots: Slots) -> Iterator[DiskThreads]:
    threads = DiskThreads()
    threads.open(opened(tmp_path / "cache"), slots)
    wait_for(threads, indexed)
    yield threads
    threads.close()


def test_what_is_written_is_read(disk: DiskThreads, slots: Slots) -> None:
    before = slots.memory.clone()
    disk.start([FileTransfer(TransferId(n), "h2f", SlotId(n), page_file(n)) for n in range(4)])
    assert set(wait_for(disk, ended(4))) == {FileReport(TransferId(n)) for n in range(4)}
    disk.start([FileTransfer(TransferId(n), "f2h", SlotId(n + 4), page_file(n)) for n in range(4)])
    wait_for(disk, ended(4))
    assert torch.equal(slots.memory[4:], before[:4])


def test_a_read_waits_for_memory_behind_its_slot(disk: DiskThreads, slots: Slots) -> None:
    disk.start([FileTransfer(TransferId(1), "h2f", SlotId(0), page_file(1))])
    wait_for(disk, ended(1))
    slots.missing = {5}
    disk.start([FileTransfer(TransferId(2), "f2h", SlotId(5), page_file(1))])
    assert disk.poll() == []
    slots.missing = set()
    assert wait_for(disk, ended(1)) == [FileReport(TransferId(2))]
    assert torch.equal(slots.memory[5], slots.memory[0])


def test_what_is_missing_or_refused_is_told(
    disk: DiskThreads, slots: Slots, tmp_path: Path
) -> None:
    disk.start([FileTransfer(TransferId(1), "f2h", SlotId(0), page_file(1))])
    assert wait_for(disk, ended(1)) == [FileReport(TransferId(1), fault="gone")]
    (tmp_path / "cache").rename(tmp_path / "moved")
    disk.start([FileTransfer(TransferId(2), "h2f", SlotId(0), page_file(1))])
    assert wait_for(disk, ended(1)) == [FileReport(TransferId(2), fault="gone")]


def test_the_index_comes_most_recently_used_first(tmp_path: Path, slots: Slots) -> None:
    files = opened(tmp_path)
    for number in range(5):
        files.write(page_file(number), memoryview(bytes(PAGE_BYTES)))
        os.utime(files.path(page_file(number).key), (1000 + number, 1000 + number))
    files.touch(page_file(2).key)
    disk = DiskThreads()
    disk.open(files, slots)
    reports = wait_for(disk, indexed)
    keys = [key for each in reports if isinstance(each, IndexReport) for key in each.keys]
    assert keys == [page_file(number).key for number in (2, 4, 3, 1, 0)]
    disk.start([FileChanges(remove=(keys[0],))])
    deadline = time.monotonic() + 60
    while files.path(keys[0]).exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    disk.close()


def test_many_files_are_told_in_parts(tmp_path: Path, slots: Slots) -> None:
    files = opened(tmp_path)
    count = 1500
    for number in range(count):
        files.write(page_file(number), memoryview(bytes(PAGE_BYTES)))
    disk = DiskThreads()
    disk.open(files, slots)
    parts = [each for each in wait_for(disk, indexed) if isinstance(each, IndexReport)]
    assert max(len(part.keys) for part in parts) <= 1000
    assert sum(len(part.keys) for part in parts) == count
    disk.close()
