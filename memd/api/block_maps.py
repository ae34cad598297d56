"""What every block of the pool holds, now and at earlier moments.

The daemon takes a map every so often and keeps those of the last minutes, compressed, in memory, so
that operators can look back. Runs on the event loop; what takes longer than a moment, on a thread.
"""

import asyncio
import time
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from memd.api.engine_client import EngineClient
from memd.api.errors import ApiError
from memd.api.job_commands import skipped_without_engine
from memd.config_operator import HistorySettings
from memd.engine.messages import Describe
from memd.engine.snapshot_types import EngineSnapshot, Histogram
from memd.jobs import Job, JobSkipped

JOB_NAME = "pool_maps"
LIMIT_BYTES = 64 * 2**20  # of all maps together, compressed; the oldest go first
MAX_BLOCKS = 100_000  # of one map
_BLOCKS_AT_ONCE = 1000


async def describe_blocks(engine: EngineClient, offset: int, limit: int) -> dict[str, Any]:
    """Columns of blocks, asked for in parts, so that the engine's steps go on in between."""
    whole: dict[str, Any] = {}
    for start in range(offset, offset + limit, _BLOCKS_AT_ONCE):
        count = min(_BLOCKS_AT_ONCE, offset + limit - start)
        part = await engine.command(Describe, what="blocks", offset=start, limit=count)
        if not whole:
            whole = part
        else:
            whole["tenants"] = part["tenants"]  # grows at its end only
            for name, values in part["columns"].items():
                whole["columns"][name] += values
        if start + count >= part["total"]:
            break
    return whole


@dataclass(frozen=True)
class _Map:
    """A moment of the pool.

    Args:
        time: Unix seconds.
        taken_at: When the engine was asked; before `time` where nothing has happened since.
        packed: The answer of `describe_blocks`, and the pool's counts.
    """

    time: float
    taken_at: float
    packed: bytes


class BlockMaps:
    """The maps of the last minutes.

    Args:
        engine: Describes the blocks.
        settings: How often, and for how long.
        clock: Unix seconds.
    """

    def __init__(
        self,
        engine: EngineClient,
        settings: HistorySettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self.every_seconds = settings.map_every
        self.keep_seconds = settings.keep_maps
        self._clock = clock
        self._maps: deque[_Map] = deque()
        self._seen: object = None  # what the engine had done by the latest map

    def job(self) -> Job:
        """Takes a map every so often."""
        return Job(JOB_NAME, self.every_seconds, 60.0, self.take)

    async def take(self) -> None:
        """Take a map now and drop what is too old. The job's work.

        Raises:
            JobSkipped: maps are off, or no engine is there to be asked, or to answer.
            ApiError: the engine did not answer in time.
        """
        snapshot = self._engine.snapshot
        if not self.keep_seconds:
            raise JobSkipped("history.keep_maps is 0")
        if self._engine.ready is None or snapshot is None:
            raise JobSkipped("the engine does not serve")
        now, seen = self._clock(), _activity(self._engine.ready.pid, snapshot)
        if self._maps and seen == self._seen:
            latest = self._maps[-1]
            self._keep(_Map(now, latest.taken_at, latest.packed))
            return
        with skipped_without_engine():
            whole = await describe_blocks(self._engine, 0, MAX_BLOCKS)
        whole["pool"] = _counts(snapshot)
        self._keep(_Map(now, now, await asyncio.to_thread(_pack, whole)))
        self._seen = seen

    @property
    def times(self) -> list[float]:
        """Unix seconds of the maps, ascending."""
        return [each.time for each in self._maps]

    @property
    def size_bytes(self) -> int:
        """Of all maps; those between which nothing happened share their bytes."""
        return sum({id(each.packed): len(each.packed) for each in self._maps}.values())

    async def at(self, moment: float, offset: int, limit: int) -> dict[str, Any]:
        """The latest map of that moment or before, in the form of `describe_blocks`.

        Args:
            moment: Unix seconds.
            offset: First block.
            limit: Most blocks.

        Returns:
            Besides, `time`: when it was so; and `pool`: the pool's counts of then.

        Raises:
            ApiError: 404, no map as old as that is kept.
        """
        index = bisect_right(self.times, moment)
        if not index:
            now = self._clock()
            oldest = (
                f"the oldest is {now - self._maps[0].time:.0f} s old"
                if self._maps
                else "there is none"
            )
            asked = f"no map is kept of {now - moment:.0f} s ago or before"
            raise ApiError(404, f"{asked}: {oldest}", "not_found", "at")
        found = self._maps[index - 1]
        whole = await asyncio.to_thread(_unpack, found.packed)
        columns = {name: each[offset : offset + limit] for name, each in whole["columns"].items()}
        idle = found.time - found.taken_at
        columns["age_seconds"] = [age and age + idle for age in columns["age_seconds"]]
        return {**whole, "offset": offset, "columns": columns, "time": found.time}

    def _keep(self, new: _Map) -> None:
        # A clock that was set back makes what came before unfindable.
        while self._maps and self._maps[-1].time >= new.time:
            self._maps.pop()
        self._maps.append(new)
        while self._maps[0].time < new.time - self.keep_seconds or (
            len(self._maps) > 1 and self.size_bytes > LIMIT_BYTES
        ):
            self._maps.popleft()


def _activity(pid: int, snapshot: EngineSnapshot) -> object:
    """Equal as long as no block can have changed."""
    return pid, snapshot.steps, _counts(snapshot)


def _counts(snapshot: EngineSnapshot) -> dict[str, Any]:
    counts = msgspec.structs.asdict(snapshot.pool)
    return {name: each for name, each in counts.items() if not isinstance(each, Histogram | dict)}


def _pack(whole: dict[str, Any]) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(whole), 1)


def _unpack(packed: bytes) -> dict[str, Any]:
    whole: dict[str, Any] = msgspec.msgpack.decode(zlib.decompress(packed))
    return whole
