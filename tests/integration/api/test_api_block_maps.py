"""Maps of the pool at earlier moments: kept, bounded, found again, and nothing asked in vain."""

import asyncio
import time
from types import SimpleNamespace

import msgspec
import pytest
from http_stand import engine_snapshot

from memd.api import block_maps
from memd.api.block_maps import BlockMaps
from memd.api.errors import ApiError
from memd.config_operator import HistorySettings
from memd.jobs import JobSkipped


class Engine:
    """Describes three blocks, of which the first has been idle for ten seconds."""

    def __init__(self) -> None:
        self.ready = SimpleNamespace(pid=1)
        self.snapshot = engine_snapshot()
        self.asked = 0

    def work(self) -> None:
        steps = {"decode": self.snapshot.steps["decode"] + 1}
        self.snapshot = msgspec.structs.replace(self.snapshot, steps=steps)

    async def command(self, kind, *, what, offset, limit):
        assert what == "blocks"
        self.asked += 1
        blocks = list(range(3))[offset : offset + limit]
        ages = [10.0, None, 0.0][offset : offset + limit]
        columns = {"block": blocks, "age_seconds": ages, "active": [self.asked for _ in blocks]}
        return {"total": 3, "offset": offset, "tenants": ["", "ann"], "columns": columns}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def clock():
    return Clock()


def kept(engine, clock, keep=600.0):
    return BlockMaps(engine, HistorySettings(map_every=10, keep_maps=keep), clock)


def take(maps, clock, at):
    clock.now = at
    asyncio.run(maps.take())


def look(maps, at, offset=0, limit=100):
    return asyncio.run(maps.at(at, offset, limit))


def test_the_latest_map_of_a_moment_or_before_is_found(engine, clock):
    maps = kept(engine, clock)
    for at in (1000.0, 1010.0, 1020.0):
        take(maps, clock, at)
        engine.work()
    assert maps.times == [1000.0, 1010.0, 1020.0]
    found = look(maps, 1019.9)
    assert found["time"] == 1010.0
    assert found["columns"]["active"] == [2, 2, 2]
    assert found["pool"]["capacity_pages"] == 64
    assert "pins" not in found["pool"]
    assert look(maps, 5000.0)["time"] == 1020.0
    part = look(maps, 1010.0, offset=1, limit=1)
    assert part["columns"]["block"] == [1]
    assert (part["total"], part["offset"]) == (3, 1)
    clock.now = 1030.0
    told = "no map is kept of 31 s ago or before: the oldest is 30 s old"
    with pytest.raises(ApiError, match=told):
        look(maps, 999.4)


def test_while_nothing_happens_the_engine_is_not_asked_and_idle_pages_grow_older(engine, clock):
    maps = kept(engine, clock)
    for at in (1000.0, 1010.0, 1040.0):
        take(maps, clock, at)
    assert engine.asked == 1
    assert look(maps, 1040.0)["columns"]["age_seconds"] == [50.0, None, 0.0]
    assert look(maps, 1000.0)["columns"]["age_seconds"] == [10.0, None, 0.0]
    engine.ready.pid = 2  # another engine: its pool is another one
    take(maps, clock, 1050.0)
    assert engine.asked == 2


def test_old_maps_go_by_time_and_by_room(engine, clock, monkeypatch):
    maps = kept(engine, clock, keep=20.0)
    for at in range(1000, 1060, 10):
        take(maps, clock, float(at))
        engine.work()
    assert maps.times == [1030.0, 1040.0, 1050.0]
    monkeypatch.setattr(block_maps, "LIMIT_BYTES", maps.size_bytes // 2)
    take(maps, clock, 1060.0)
    assert maps.times == [1060.0]
    assert maps.size_bytes > 0


def test_a_clock_that_is_set_back_leaves_moments_in_order(engine, clock):
    maps = kept(engine, clock)
    for at in (1000.0, 1010.0, 1005.0):
        take(maps, clock, at)
        engine.work()
    assert maps.times == [1000.0, 1005.0]


def test_nothing_is_kept_without_an_engine_or_when_maps_are_off(engine, clock):
    off = kept(engine, clock, keep=0.0)
    with pytest.raises(JobSkipped, match="keep_maps is 0"):
        take(off, clock, 1000.0)
    engine.ready = None
    with pytest.raises(JobSkipped, match="does not serve"):
        take(kept(engine, clock), clock, 1000.0)
    with pytest.raises(ApiError, match="there is none"):
        look(off, 1000.0)


def test_an_engine_that_dies_while_it_is_asked_is_no_error(engine, clock):
    """The supervisor tells of its death; a job's traceback beside it would say nothing more."""

    def dies(code):
        async def command(kind, **fields):
            raise ApiError(503, "the engine is gone", code)

        return command

    engine.command = dies("restarting")
    with pytest.raises(JobSkipped, match="is gone"):
        take(kept(engine, clock), clock, 1000.0)
    engine.command = dies("engine_timeout")
    with pytest.raises(ApiError):
        take(kept(engine, clock), clock, 1000.0)


def test_over_http(stand):
    assert stand.http.get("/admin/v1/pool/maps").json()["times"] == []
    asyncio.run_coroutine_threadsafe(stand.service.maps.take(), stand.loop).result(10)
    answer = stand.http.get("/admin/v1/pool/maps").json()
    assert (answer["every_seconds"], answer["keep_seconds"]) == (15.0, 600.0)
    (moment,) = answer["times"]
    then = stand.http.get("/admin/v1/pool/blocks", params={"at": time.time()}).json()
    assert then["time"] == moment
    early = stand.http.get("/admin/v1/pool/blocks", params={"at": moment - 1})
    assert (early.status_code, early.json()["error"]["param"]) == (404, "at")
    assert stand.http.get("/admin/v1/pool/blocks", params={"at": "nan"}).status_code == 400
