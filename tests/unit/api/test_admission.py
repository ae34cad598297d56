"""The queue's limit, and when a refused client is told to come back."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from http_stand import engine_snapshot

from memd.api.admission import Admission
from memd.api.errors import ApiError
from memd.config import build
from memd.observe.tenant_metrics import Rejections
from memd.settings import LiveSettings


@dataclass
class Engine:
    """What admission looks at."""

    open: dict[str, int] = field(default_factory=dict)
    snapshot: Any = None
    ended: int = 0


class Door:
    def __init__(self, limit: int) -> None:
        self.engine, self.now = Engine(), 100.0
        live = LiveSettings(build({"engine.max_waiting": limit}))
        self.admission = Admission(self.engine, live, Rejections(), lambda: self.now)  # type: ignore[arg-type]

    def set(self, running: int, waiting: int) -> None:
        self.engine.snapshot = engine_snapshot(running)
        self.engine.open = {str(each): each for each in range(running + waiting)}

    def retry_after(self, new: int = 1) -> int | None:
        """Seconds; None when it is let in."""
        try:
            self.admission.check(new)
        except ApiError as error:
            return int(error.headers["retry-after"])
        return None


@pytest.mark.parametrize(
    ("running", "waiting", "new", "is_let_in"),
    [
        (0, 0, 1, True),
        (0, 0, 500, True),
        (256, 0, 500, True),
        (256, 9, 1, True),
        (256, 9, 2, False),
        (256, 10, 1, False),
        (0, 10, 1, False),
        (5, -2, 1, True),  # the snapshot is older than the ends of two sequences
    ],
)
def test_who_is_let_in(running: int, waiting: int, new: int, is_let_in: bool) -> None:
    door = Door(10)
    door.set(running, waiting)
    assert (door.retry_after(new) is None) == is_let_in


@pytest.mark.parametrize(
    ("ended", "seconds", "expected"),
    [
        (100, 10, 5),  # ten a second: the 100 that wait need 10 s
        (1000, 10, 1),
        (100_000, 10, 1),
        (1, 10, 60),
        (0, 10, 60),
    ],
)
def test_the_time_follows_from_the_rate(ended: int, seconds: float, expected: int) -> None:
    door = Door(100)
    door.set(8, 50)
    assert door.retry_after() is None
    door.now += seconds
    door.engine.ended += ended
    door.set(8, 100)
    assert door.retry_after() == expected


def test_only_the_recent_rate_counts() -> None:
    door = Door(100)
    door.set(8, 50)
    for _ in range(100):  # ten a second, long ago
        door.now += 1
        door.engine.ended += 10
        assert door.retry_after() is None
    for _ in range(40):  # one in two seconds since
        door.now += 2
        door.engine.ended += 1
        assert door.retry_after() is None
    door.set(8, 100)
    assert door.retry_after() == 60
    door.engine.ended += 300
    assert door.retry_after() == 5


def test_without_a_snapshot_everything_waits() -> None:
    door = Door(10)
    door.engine.open = {str(each): each for each in range(10)}
    assert door.retry_after() is not None
