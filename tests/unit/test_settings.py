"""Live settings: whole or not at all, recorded, undone, confirmed, reloaded, kept."""

import asyncio
import contextlib

import pytest

from memd.config import LIVE_KEYS, Settings, build
from memd.config_sources import Sources
from memd.errors import SettingsError
from memd.settings import LiveSettings
from memd.settings_history import CannotUndo
from memd.settings_saved import SavedError, SavedSettings
from memd.settings_state import Author, StaleRevision, Unconfirmed

HIGH, LOW = "memory.watermark.high", "memory.watermark.low"
WAITING = "engine.max_waiting"
ME = Author("me", "why")


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


class Journal:
    """Keeps what a store would."""

    def __init__(self):
        self.rows, self.events = [], []

    def add_rows(self, table, rows):
        assert table == "settings_revisions"
        self.rows += rows

    def add_event(self, kind, message, details):
        self.events.append((kind, message, details))


class Clock:
    """Both clocks; the monotonic one is moved by hand."""

    def __init__(self):
        self.now = 0.0

    def wall(self):
        return 1000.0 + self.now

    def monotonic(self):
        return self.now


@contextlib.asynccontextmanager
async def running(
    engine=None, settings=None, sources=None, saved=None, journal=None, recall=None, clock=None
):
    """A started LiveSettings; stopped at the end."""
    clock = clock or Clock()
    origins = {}
    if sources is not None:
        loaded = sources.read()
        settings, origins = loaded.settings, loaded.origins
    live = LiveSettings(
        *(settings or Settings(), origins, sources), clock=clock.wall, monotonic=clock.monotonic
    )
    live.start((engine or Engine()).apply, saved, journal, recall)
    await live.recalled()
    await asyncio.sleep(0)
    try:
        yield live
    finally:
        await live.stop()


async def change(live, changes, **more):
    return await live.change(changes, live.revision, ME, **more)


def high(live):
    return live.current.memory.watermark.high


def source(live, key=HIGH):
    """Who holds a key: the revision of a live value, or None for the sources."""
    override = live.state.layers.in_force.get(key)
    return override and override.revision


def asynchronous(test):
    """Runs a coroutine test."""

    def run(*arguments, **named):
        asyncio.run(test(*arguments, **named))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__signature__ = __import__("inspect").signature(test)
    return run


@asynchronous
async def test_a_change_is_applied_and_recorded():
    engine, journal = Engine(), Journal()
    async with running(engine, journal=journal) as live:
        assert await change(live, {HIGH: "85%"}) == {HIGH: {"old": 0.9, "new": 0.85}}
        assert engine.applied == [(2, {HIGH: 0.85})]
        row = live.state.rows[-1]
        assert (row.revision, row.time, row.who, row.reason, row.kind, row.source) == (
            *(2, 1000.0, "me", "why", "change", "api"),
        )
        assert (high(live), live.current.memory.watermark.low) == (0.85, 0.7)
        assert [each["revision"] for each in journal.rows] == [1, 2]
        assert journal.rows[1]["changes"] == {HIGH: {"old": 0.9, "new": 0.85}}
        kind, message, details = journal.events[-1]
        assert (kind, message) == ("settings_change", f"revision 2: {HIGH} 90% → 85%")
        assert details == {"who": "me", "reason": "why", "source": "api"}
        assert live.counts[HIGH, "api", "applied"] == 1


@asynchronous
async def test_sections_may_be_nested():
    async with running() as live:
        await change(live, {"memory": {"watermark": {"high": 0.8}}})
        assert high(live) == 0.8


@asynchronous
async def test_a_change_that_changes_nothing_has_no_revision():
    engine = Engine()
    async with running(engine) as live:
        assert await change(live, {HIGH: "90%"}) == {}
        assert (live.revision, engine.applied, source(live)) == (1, [], None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({HIGH: 0.5}, "memory.watermark"),
        ({HIGH: 0.8, LOW: 0.8}, "memory.watermark"),
        ({HIGH: float("nan")}, HIGH),
        ({HIGH: None}, HIGH),
        ({"model.dtype": "float32"}, "model.dtype"),
        ({"memory.nothing": 1}, "memory.nothing"),
        ({HIGH: 0.8, "server.port": 1}, "server.port"),
        ({"engine.reserve_tokens": -1}, "engine.reserve_tokens"),
    ],
)
@asynchronous
async def test_invalid_changes_name_the_key_and_apply_nothing(changes, named):
    engine, journal = Engine(), Journal()
    async with running(engine, journal=journal) as live:
        with pytest.raises(SettingsError) as error:
            await change(live, changes)
        assert named in error.value.problems
        assert (live.revision, engine.applied, live.current) == (1, [], Settings())
        assert journal.events[-1][0] == "settings_rejected"
        rejected = {k for k in LIVE_KEYS if live.counts[k, "api", "rejected"]}
        assert rejected == LIVE_KEYS & changes.keys()


@asynchronous
async def test_a_stale_revision_is_refused():
    async with running() as live:
        await change(live, {HIGH: 0.8})
        with pytest.raises(StaleRevision) as error:
            await live.change({HIGH: 0.85}, 1, ME)
        assert error.value.current == 2


@asynchronous
async def test_what_the_engine_refuses_is_not_recorded():
    engine = Engine()
    async with running(engine) as live:
        engine.refuses = True
        with pytest.raises(RuntimeError):
            await change(live, {HIGH: 0.8})
        assert (live.revision, live.current) == (1, Settings())


@asynchronous
async def test_what_the_engine_may_have_taken_is_told_again_with_the_next_change():
    """A command that timed out may still be applied; the next one puts it right."""
    engine = Engine()
    async with running(engine) as live:
        engine.refuses = True
        with pytest.raises(RuntimeError):
            await change(live, {HIGH: 0.8})
        engine.refuses = False
        await change(live, {LOW: 0.6})
        await change(live, {LOW: 0.5})
        assert engine.applied == [(2, {HIGH: 0.9, LOW: 0.6}), (3, {LOW: 0.5})]


@asynchronous
async def test_of_two_changes_at_once_one_is_stale():
    engine = Engine()
    async with running(engine) as live:
        changes = (live.change({HIGH: value}, 1, ME) for value in (0.8, 0.85))
        results = await asyncio.gather(*changes, return_exceptions=True)
        assert isinstance(results[1], StaleRevision)
        assert (high(live), len(engine.applied)) == (0.8, 1)


@asynchronous
async def test_undo_walks_back_over_what_is_not_yet_undone():
    async with running() as live:
        for value in (0.8, 0.85):
            await change(live, {HIGH: value})
        await live.undo(ME)
        seen = [high(live)]
        await change(live, {HIGH: 0.75})
        for _ in range(2):
            await live.undo(ME)
            seen.append(high(live))
        assert seen == [0.8, 0.8, 0.9]
        assert source(live) is None
        with pytest.raises(CannotUndo):
            await live.undo(ME)
        assert [row.undoes for row in live.state.rows] == [None, None, None, 3, None, 5, 2]
        assert live.counts[HIGH, "api", "reverted"] == 3


@asynchronous
async def test_any_revision_can_be_undone_unless_a_later_one_is_in_the_way():
    async with running() as live:
        await change(live, {HIGH: 0.8, WAITING: 10})  # 2
        await change(live, {"engine.reserve_tokens": 4})  # 3
        await change(live, {HIGH: 0.85})  # 4
        with pytest.raises(CannotUndo) as error:
            await live.undo(ME, 2)
        assert (error.value.code, error.value.conflicts) == ("conflict", {HIGH: 4})
        await live.undo(ME, 3)
        assert (high(live), live.current.engine.reserve_tokens) == (0.85, 8)
        await live.undo(ME, 4)
        changes = await live.undo(ME, 2)
        assert changes == {HIGH: {"old": 0.8, "new": 0.9}, WAITING: {"old": 10, "new": 1024}}
        for revision, words in ((2, "taken back by revision 7"), (1, "start"), (99, "no revision")):
            with pytest.raises(CannotUndo, match=words):
                await live.undo(ME, revision)


@asynchronous
async def test_an_undo_can_be_undone():
    async with running() as live:
        await change(live, {HIGH: 0.8})
        await live.undo(ME)
        await live.undo(ME, 3)
        assert (high(live), source(live)) == (0.8, 2)
        await live.undo(ME)
        assert high(live) == 0.9


@asynchronous
async def test_an_undo_that_would_not_be_valid_changes_nothing():
    async with running() as live:
        await change(live, {LOW: 0.5})
        await change(live, {HIGH: 0.6})
        with pytest.raises(SettingsError, match=r"low \(0.7\) must be above 0 and below high"):
            await live.undo(ME, 2)
        assert (high(live), live.revision) == (0.6, 3)


@asynchronous
async def test_a_reset_gives_the_key_back_to_the_sources():
    async with running(settings=build({HIGH: 0.88})) as live:
        assert await change(live, {}, reset=[HIGH]) == {}
        await change(live, {HIGH: 0.8})
        assert await change(live, {LOW: 0.5}, reset=[HIGH]) == {
            HIGH: {"old": 0.8, "new": 0.88, "reset": True},
            LOW: {"old": 0.7, "new": 0.5},
        }
        assert source(live) is None
        await live.undo(ME)
        assert (high(live), source(live)) == (0.8, 2)
        with pytest.raises(SettingsError, match="both"):
            await change(live, {HIGH: 0.7}, reset=[HIGH])
        with pytest.raises(SettingsError, match="unknown"):
            await change(live, {}, reset=["nothing"])


@asynchronous
async def test_what_is_not_confirmed_reverts():
    clock, engine = Clock(), Engine()
    async with running(engine, clock=clock) as live:
        await change(live, {HIGH: 0.8}, revert_after_seconds=60)
        assert live.state.pending.row.confirm_by == 1060.0
        clock.now = 59.0
        await live.revert_if_due()
        assert high(live) == 0.8
        clock.now = 60.0
        engine.refuses = True
        with pytest.raises(RuntimeError):
            await live.revert_if_due()
        assert (high(live), live.state.pending.row.revision) == (0.8, 2)
        engine.refuses = False
        await live.revert_if_due()
        assert (high(live), live.state.pending) == (0.9, None)
        row = live.state.rows[-1]
        assert (row.kind, row.undoes, row.source) == ("revert", 2, "schedule")
        assert live.counts[HIGH, "schedule", "reverted"] == 1


@asynchronous
async def test_the_revert_comes_by_itself(monkeypatch):
    monkeypatch.setattr("memd.settings.RETRY_SECONDS", 0.01)
    engine = Engine()
    live = LiveSettings(Settings())
    live.start(engine.apply)
    await change(live, {HIGH: 0.8}, revert_after_seconds=0.05)
    engine.refuses = True
    await asyncio.sleep(0.1)
    assert high(live) == 0.8
    engine.refuses = False
    async with asyncio.timeout(2):
        while live.state.pending is not None:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.005)
    assert (high(live), engine.applied[-1]) == (0.9, (3, {HIGH: 0.9}))
    await live.stop()


@asynchronous
async def test_a_confirmed_change_stays():
    clock = Clock()
    async with running(clock=clock) as live:
        await change(live, {HIGH: 0.8}, revert_after_seconds=60)
        for revision in (1, 3):
            with pytest.raises(Unconfirmed):
                await live.confirm(revision, ME)
        await live.confirm(2, ME)
        clock.now = 100.0
        await live.revert_if_due()
        assert (high(live), live.revision) == (0.8, 2)
        with pytest.raises(Unconfirmed):
            await live.confirm(2, ME)


@asynchronous
async def test_while_a_change_waits_nothing_may_hinder_its_revert():
    clock = Clock()
    async with running(clock=clock) as live:
        await change(live, {LOW: 0.5}, revert_after_seconds=60)
        with pytest.raises(Unconfirmed, match=r"revision 2 changes memory\.watermark\.low"):
            await change(live, {LOW: 0.6})
        with pytest.raises(Unconfirmed, match="one at a time"):
            await change(live, {WAITING: 5}, revert_after_seconds=5)
        with pytest.raises(SettingsError, match="once revision 2 reverts by itself"):
            await change(live, {HIGH: 0.65})
        await change(live, {HIGH: 0.8})
        clock.now = 60.0
        await live.revert_if_due()
        assert (live.current.memory.watermark.low, high(live)) == (0.7, 0.8)


@asynchronous
async def test_an_undo_of_what_waits_leaves_nothing_to_revert():
    async with running() as live:
        await change(live, {HIGH: 0.8}, revert_after_seconds=60)
        await live.undo(ME)
        assert (high(live), live.state.pending) == (0.9, None)


def written(tmp_path, text):
    file = tmp_path / "memd.yaml"
    file.write_text(text)
    return Sources(file, ["log_level=debug"], {"MEMD_ENGINE_MAX_WAITING": "7"})


@asynchronous
async def test_a_reload_tells_what_it_did_to_each_key(tmp_path):
    engine, clock, journal = Engine(), Clock(), Journal()
    sources = written(tmp_path, f"{HIGH}: 85%\n{LOW}: 60%\nserver.port: 1\n")
    async with running(engine, sources=sources, clock=clock, journal=journal) as live:
        assert (live.origins[HIGH], live.origins[WAITING]) == ("file", "environment")
        assert (live.origins["log_level"], live.origins["memory.limit"]) == ("flag", "default")
        await change(live, {HIGH: 0.9})
        clock.now = 5.0
        written(tmp_path, f"{HIGH}: 95%\n{LOW}: 50%\nserver.port: 2\nengine.reserve_tokens: 8\n")
        results = await live.reload(ME)
        assert results[HIGH] == {"result": "overridden", "old": 0.9, "new": 0.95}
        assert results[LOW] == {"result": "applied", "old": 0.6, "new": 0.5}
        assert results["server.port"] == {"result": "needs_restart", "old": 1, "new": 2}
        assert results[WAITING] == {"result": "unchanged", "old": 7, "new": 7}
        assert engine.applied[-1] == (3, {LOW: 0.5})
        assert (live.origins["engine.reserve_tokens"], live.since[LOW]) == ("file", 1005.0)
        assert live.since[HIGH] == 1005.0
        assert live.since[WAITING] == 1000.0
        assert live.current.server.port == 1
        row = live.state.rows[-1]
        assert (row.kind, row.source, row.changes) == (
            *("reload", "file", {LOW: {"old": 0.6, "new": 0.5}}),
        )
        await live.undo(ME)  # of the live change: what the file says now is in force
        assert high(live) == 0.95
        with pytest.raises(CannotUndo, match="read from the sources"):
            await live.undo(ME, 3)
        assert live.last_reload.succeeded_at == 1005.0
        assert journal.events[-2][0] == "settings_reload"


@asynchronous
async def test_a_reload_is_all_or_nothing(tmp_path):
    engine, clock, journal = Engine(), Clock(), Journal()
    sources = written(tmp_path, f"{HIGH}: 85%\n")
    async with running(engine, sources=sources, clock=clock, journal=journal) as live:
        await change(live, {LOW: 0.8})
        clock.now = 5.0
        wrong = f"{HIGH}: 95%\nengine.reserve_tokens: many"
        for text in (wrong, "a: b: c", f"{HIGH}: 75%", "[1]"):
            written(
                tmp_path, text
            )  # 75 % is above the default low mark, but not above the live one
            with pytest.raises(SettingsError):
                await live.reload(ME)
        written(tmp_path, f"{HIGH}: 95%")
        engine.refuses = True
        with pytest.raises(RuntimeError):
            await live.reload(ME)
        assert (high(live), live.revision, live.state.base[HIGH]) == (0.85, 2, 0.85)
        assert (live.last_reload.time, live.last_reload.succeeded_at) == (1005.0, 1000.0)
        assert live.last_reload.error == "refused"
        assert journal.events[-1][0] == "settings_reload_failed"
        engine.refuses = False
        await live.reload(ME)
        assert (high(live), live.last_reload.error) == (0.95, None)


@asynchronous
async def test_a_reload_that_finds_nothing_new_has_no_revision(tmp_path):
    async with running(sources=written(tmp_path, "")) as live:
        results = await live.reload(ME)
        assert {each["result"] for each in results.values()} == {"unchanged"}
        assert live.revision == 1


@asynchronous
async def test_a_reload_never_hinders_a_revert(tmp_path):
    sources = written(tmp_path, "")
    async with running(sources=sources) as live:
        await change(live, {LOW: 0.5}, revert_after_seconds=60)
        written(tmp_path, f"{HIGH}: 60%\n{LOW}: 40%")
        await live.reload(ME)  # the revert would go to 40 %, which the file says now
        written(tmp_path, f"{HIGH}: 45%\n{LOW}: 40%")
        with pytest.raises(SettingsError):
            await live.reload(ME)


@asynchronous
async def test_values_that_are_kept_survive_a_restart(tmp_path):
    saved, journal = SavedSettings(tmp_path), Journal()
    async with running(saved=saved, journal=journal) as live:
        await change(live, {HIGH: 0.8}, persist=True)
        await change(live, {HIGH: 0.82, WAITING: 9})
    async with running(saved=SavedSettings(tmp_path)) as live:  # without a database
        assert (high(live), source(live), live.revision) == (0.8, 2, 4)
        assert live.current.engine.max_waiting == 1024
        assert live.state.layers.in_force[HIGH].who == "me"
        with pytest.raises(CannotUndo, match="no revision 2"):
            await live.undo(ME, 2)
        await change(live, {}, reset=[HIGH])
        assert high(live) == 0.9
    async with running(saved=SavedSettings(tmp_path)) as live:
        assert (high(live), live.revision) == (0.9, 6)


@asynchronous
async def test_a_value_in_force_can_be_kept_afterwards(tmp_path):
    async with running(saved=SavedSettings(tmp_path)) as live:
        await change(live, {HIGH: 0.8})
        assert await change(live, {HIGH: 0.8}, persist=True) == {HIGH: {"old": 0.8, "new": 0.8}}
        assert await change(live, {HIGH: 0.8}, persist=True) == {}
    async with running(saved=SavedSettings(tmp_path)) as live:
        assert high(live) == 0.8


def recalling(journal):
    from memd.settings_journal import from_row

    async def recall():
        return [from_row(row) for row in journal.rows]

    return recall


@asynchronous
async def test_undo_reaches_over_a_restart(tmp_path):
    journal = Journal()
    async with running(saved=SavedSettings(tmp_path), journal=journal) as live:
        await change(live, {HIGH: 0.8}, persist=True)  # 2
        await change(live, {HIGH: 0.85}, persist=True)  # 3
        await change(live, {WAITING: 9})  # 4
    recall = recalling(journal)
    async with running(saved=SavedSettings(tmp_path), journal=journal, recall=recall) as live:  # 5
        assert [row.revision for row in live.state.rows] == [1, 2, 3, 4, 5]
        with pytest.raises(CannotUndo, match="ended with the restart at revision 5"):
            await live.undo(ME, 4)
        with pytest.raises(CannotUndo, match="in the way"):
            await live.undo(ME, 2)
        await live.undo(ME)
        assert (high(live), source(live)) == (0.8, 2)
    async with running(saved=SavedSettings(tmp_path), journal=journal, recall=recall) as live:
        assert high(live) == 0.8
        await live.undo(ME)
        assert high(live) == 0.9
        await live.undo(ME, live.revision)
        assert high(live) == 0.8


@asynchronous
async def test_numbers_rise_when_only_the_database_knows_them():
    journal = Journal()
    async with running(journal=journal) as live:
        await change(live, {HIGH: 0.8})
    async with running(journal=journal, recall=recalling(journal)) as live:
        assert (live.revision, high(live)) == (3, 0.9)
        await change(live, {HIGH: 0.8})
    assert [row["revision"] for row in journal.rows] == [1, 2, 3, 4]


@asynchronous
async def test_a_dead_database_hinders_nothing(monkeypatch, caplog):
    monkeypatch.setattr("memd.settings.RECALL_SECONDS", 0.05)

    async def never():
        await asyncio.Event().wait()

    async def broken():
        raise OSError("no such host")

    for recall, words in ((never, "no answer in 0.05 s"), (broken, "no such host")):
        async with running(recall=recall) as live:
            await change(live, {HIGH: 0.8})
            assert live.revision == 2
        assert words in caplog.text


@asynchronous
async def test_a_change_that_cannot_be_kept_is_refused(tmp_path):
    engine = Engine()
    (tmp_path / "state").write_text("a file, where the directory should be")
    async with running(engine, saved=SavedSettings(tmp_path / "elsewhere")) as live:
        live._saved.path = tmp_path / "state" / "live-settings.json"
        with pytest.raises(SavedError):
            await change(live, {HIGH: 0.8}, persist=True)
        assert (high(live), engine.applied) == (0.9, [])
        await change(live, {HIGH: 0.8})  # what need not be kept goes on
        assert high(live) == 0.8


@asynchronous
async def test_what_the_engine_refuses_is_not_kept_either(tmp_path):
    engine = Engine()
    async with running(engine, saved=SavedSettings(tmp_path)) as live:
        engine.refuses = True
        with pytest.raises(RuntimeError):
            await change(live, {HIGH: 0.8}, persist=True)
    assert SavedSettings(tmp_path).read()[1] == {}


@asynchronous
async def test_an_unconfirmed_change_is_kept_only_once_it_is_confirmed(tmp_path):
    async with running(saved=SavedSettings(tmp_path)) as live:
        await change(live, {HIGH: 0.8}, persist=True, revert_after_seconds=60)
        assert SavedSettings(tmp_path).read()[1] == {}
        await live.confirm(2, ME)
        assert SavedSettings(tmp_path).read()[1][HIGH].value == 0.8


@asynchronous
async def test_what_is_confirmed_after_a_refusal_is_kept(tmp_path):
    """The refused revision was written under a higher number than that of the confirmation."""
    engine = Engine()
    async with running(engine, saved=SavedSettings(tmp_path)) as live:
        await change(live, {HIGH: 0.8}, persist=True, revert_after_seconds=60)
        engine.refuses = True
        with pytest.raises(RuntimeError):
            await change(live, {LOW: 0.5})
        engine.refuses = False
        await live.confirm(2, ME)
    assert SavedSettings(tmp_path).read()[1][HIGH].value == 0.8


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"revision": 4, "values": {"memory.watermark.high": 3}}', "\xff", "null"],
)
@asynchronous
async def test_a_broken_file_is_set_aside(tmp_path, caplog, text):
    saved = SavedSettings(tmp_path)
    saved.path.write_bytes(text.encode("latin-1"))
    async with running(saved=saved) as live:
        assert live.current == Settings()
        await change(live, {HIGH: 0.8}, persist=True)
    assert "not taken up" in caplog.text
    aside = tmp_path / "live-settings.refused.json"
    assert aside.read_bytes() == text.encode("latin-1")
    assert saved.read()[1][HIGH].value == 0.8


@asynchronous
async def test_kept_values_that_no_longer_fit_the_file_are_set_aside(tmp_path, caplog):
    async with running(saved=SavedSettings(tmp_path)) as live:
        await change(live, {HIGH: 0.75}, persist=True)
    async with running(settings=build({LOW: 0.8}), saved=SavedSettings(tmp_path)) as live:
        assert (high(live), live.revision) == (0.9, 3)
    assert "low (0.8) must be above 0 and below high (0.75)" in caplog.text


@asynchronous
async def test_a_long_history_is_cut_and_nothing_else_changes(monkeypatch):
    monkeypatch.setattr("memd.settings_state.KEPT_REVISIONS", 20)
    monkeypatch.setattr("memd.settings_state._SLACK", 5)
    async with running() as live:
        await change(live, {LOW: 0.5})
        for step in range(40):
            await change(live, {HIGH: 0.6 + step / 200})
            if step % 3 == 0:
                await live.undo(ME)
        assert len(live.state.rows) <= 25
        assert live.current.memory.watermark.low == 0.5
        assert high(live) == pytest.approx(0.6 + 38 / 200)  # the last one was undone
        with pytest.raises(CannotUndo, match="no revision 2"):
            await live.undo(ME, 2)


@asynchronous
async def test_every_live_key_takes_its_own_value():
    async with running(settings=build({"engine.max_batch_tokens": 64})) as live:
        values = {key: "auto" for key in LIVE_KEYS if key.endswith(("_per_step", "batch_tokens"))}
        await change(live, values)
        assert live.current.engine.max_batch_tokens == "auto"
