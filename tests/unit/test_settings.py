"""Live settings: whole or not at all, recorded, undone."""

import asyncio

import pytest

from memd.config import LIVE_KEYS, Settings, build
from memd.errors import SettingsError
from memd.settings import LiveSettings, NothingToUndo, StaleRevision

HIGH, LOW = "memory.watermark.high", "memory.watermark.low"


class Engine:
    """Records what is applied, and refuses when told to."""

    def __init__(self):
        self.applied = []
        self.refuses = False

    async def apply(self, revision, values):
        await asyncio.sleep(0)
        if self.refuses:
            raise RuntimeError("refused")
        self.applied.append((revision, values))


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def live():
    return LiveSettings(Settings(), lambda: 12.5)


def change(live, engine, changes, revision=None, who="me", reason="why"):
    revision = live.revision if revision is None else revision
    return asyncio.run(live.change(changes, revision, who, reason, engine.apply))


def undo(live, engine):
    return asyncio.run(live.undo("me", "back", engine.apply))


def test_a_change_is_applied_and_recorded(live, engine):
    assert change(live, engine, {HIGH: "85%"}) == {HIGH: {"old": 0.9, "new": 0.85}}
    assert engine.applied == [(2, {HIGH: 0.85})]
    row = live.history[-1]
    assert (row.revision, row.time, row.who, row.reason, row.kind) == (
        *(2, 12.5, "me", "why", "change"),
    )
    assert live.current.memory.watermark.high == 0.85
    assert live.current.memory.watermark.low == 0.7


def test_sections_may_be_nested(live, engine):
    change(live, engine, {"memory": {"watermark": {"high": 0.8}}})
    assert live.current.memory.watermark.high == 0.8


def test_a_change_that_changes_nothing_has_no_revision(live, engine):
    assert change(live, engine, {HIGH: "90%"}) == {}
    assert live.revision == 1
    assert engine.applied == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({HIGH: 0.5}, "memory.watermark"),
        ({HIGH: 0.8, LOW: 0.8}, "memory.watermark"),
        ({HIGH: float("nan")}, HIGH),
        ({HIGH: None}, HIGH),
        ({"memory.limit": "50%"}, "memory.limit"),
        ({"memory.nothing": 1}, "memory.nothing"),
        ({HIGH: 0.8, "server.port": 1}, "server.port"),
        ({"engine.reserve_tokens": -1}, "engine.reserve_tokens"),
    ],
)
def test_invalid_changes_name_the_key_and_apply_nothing(live, engine, changes, named):
    with pytest.raises(SettingsError) as error:
        change(live, engine, changes)
    assert named in error.value.problems
    assert (live.revision, engine.applied, live.current) == (1, [], Settings())


def test_a_stale_revision_is_refused(live, engine):
    change(live, engine, {HIGH: 0.8})
    with pytest.raises(StaleRevision) as error:
        change(live, engine, {HIGH: 0.85}, revision=1)
    assert error.value.current == 2


def test_what_the_engine_refuses_is_not_recorded(live, engine):
    engine.refuses = True
    with pytest.raises(RuntimeError):
        change(live, engine, {HIGH: 0.8})
    assert (live.revision, live.current) == (1, Settings())


def test_of_two_changes_at_once_one_is_stale(live, engine):
    async def both():
        changes = (live.change({HIGH: h}, 1, "me", "", engine.apply) for h in (0.8, 0.85))
        return await asyncio.gather(*changes, return_exceptions=True)

    results = asyncio.run(both())
    assert isinstance(results[1], StaleRevision)
    assert live.current.memory.watermark.high == 0.8
    assert len(engine.applied) == 1


def test_undo_walks_back_over_what_is_not_yet_undone(live, engine):
    seen = []
    for high in (0.8, 0.85):
        change(live, engine, {HIGH: high})
    undo(live, engine)
    seen.append(live.current.memory.watermark.high)
    change(live, engine, {HIGH: 0.75})
    for _ in range(2):
        undo(live, engine)
        seen.append(live.current.memory.watermark.high)
    assert seen == [0.8, 0.8, 0.9]
    with pytest.raises(NothingToUndo):
        undo(live, engine)
    assert [row.undoes for row in live.history] == [None, None, None, 3, None, 5, 2]


def test_every_live_key_takes_its_own_value(engine):
    live = LiveSettings(build({"engine.max_batch_tokens": 64}))
    values = {key: "auto" for key in LIVE_KEYS if key.endswith(("_per_step", "batch_tokens"))}
    change(live, engine, values)
    assert live.current.engine.max_batch_tokens == "auto"
