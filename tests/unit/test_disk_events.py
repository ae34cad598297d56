"""What the history learns of the disk tier."""

from typing import Any

from http_stand import pool_snapshot

from memd.disk_events import DiskEvents


class Events(list[tuple[str, str, dict[str, Any]]]):
    def add_event(self, kind: str, message: str, details: dict[str, Any]) -> None:
        self.append((kind, message, details))


def test_rejected_files_are_told_once() -> None:
    events = Events()
    watch = DiskEvents(events)
    for counts in ({"altered": 0}, {"altered": 2, "model": 1}, {"altered": 2, "model": 1}):
        watch.look(pool_snapshot(disk_rejected_files=counts))
    told = {"altered": 2, "model": 1}
    words = "page files of no use were removed: 2 altered, 1 model"
    assert events == [("disk_files_rejected", words, told)]
    watch.look(pool_snapshot(disk_rejected_files={"altered": 1}))  # of the next engine
    assert events[1:] == [
        ("disk_files_rejected", "page files of no use were removed: 1 altered", {"altered": 1})
    ]


def test_a_fault_is_told_when_it_begins() -> None:
    events = Events()
    watch = DiskEvents(events)
    for fault in (None, "full", "full", None, "full"):
        watch.look(pool_snapshot(disk_fault=fault))
    assert events == [("disk_fault", "the disk tier pauses: full", {"fault": "full"})] * 2
