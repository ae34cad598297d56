"""Random changes, undos, reverts, confirmations, reloads and restarts, against a simple model.

The model keeps, for each key, a list of what was put on top of what: it knows nothing of histories.
"""

import asyncio
import logging
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from depth import DEEP
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memd.config import dump, flatten
from memd.config_sources import Sources
from memd.errors import SettingsError
from memd.settings import LiveSettings
from memd.settings_history import CannotUndo
from memd.settings_journal import from_row
from memd.settings_saved import SavedSettings
from memd.settings_state import Author, StaleRevision, Unconfirmed

HIGH, LOW, WAITING = "memory.watermark.high", "memory.watermark.low", "engine.max_waiting"
MARKS = st.sampled_from([0.3, 0.5, 0.6, 0.8, 0.95])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    HIGH: MARKS,
    LOW: MARKS,
    WAITING: st.sampled_from([1, 7, 1024]),
}
CHANGES = st.sets(st.sampled_from(sorted(VALUES)), min_size=1).flatmap(
    lambda keys: st.fixed_dictionaries({key: VALUES[key] for key in sorted(keys)})
)
DEFAULTS = {HIGH: 0.9, LOW: 0.7, WAITING: 1024}
ME = Author("machine", "chance")


class Refused(Exception):
    """The engine said no."""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed reloads are logged, which is not looked at here; nor is the disk waited for."""
    for name in ("memd.settings", "memd.settings_saved"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@dataclass
class Put:
    """One change as the model sees it."""

    revision: int
    values: dict[str, Any]  # None: reset
    persist: bool
    alive: bool = True
    pending: bool = False


@dataclass
class Model:
    """What must be true. `kept`: from earlier lives; `puts`: of this one."""

    base: dict[str, Any] = field(default_factory=lambda: dict(DEFAULTS))
    file: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    puts: list[Put] = field(default_factory=list)
    undos: dict[int, Put] = field(default_factory=dict)  # undo's revision -> what it took back

    def live(self, saved: bool = False) -> dict[str, Any]:
        """The live values, or those that the next life begins with."""
        values = dict(self.kept)
        for put in self.puts:
            if not put.alive:
                continue
            for key, value in put.values.items():
                if value is None:
                    values.pop(key, None)
                elif not saved or (put.persist and not put.pending):
                    values[key] = value
        return values

    def in_force(self) -> dict[str, Any]:
        return {**self.base, **self.live()}


def valid(values: dict[str, Any]) -> bool:
    return 0 < values[LOW] < values[HIGH]


class SettingsMachine(RuleBasedStateMachine):
    """Every step is done to memd and to the model, and both must agree after it."""

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.file = Path(self.directory.name) / "memd.yaml"
        self.file.write_text("")
        self.loop = asyncio.new_event_loop()
        self.model = Model()
        self.rows: list[dict[str, Any]] = []
        self.now = 0.0
        self.engine = dict(DEFAULTS)
        self.refuses = False
        self._start()

    def teardown(self) -> None:
        if hasattr(self, "live"):
            self._run(self.live.stop())
            self.loop.close()
            self.directory.cleanup()

    def add_rows(self, table: str, rows: list[dict[str, Any]]) -> None:
        self.rows += rows

    def add_event(self, kind: str, message: str, details: dict[str, Any]) -> None:
        assert kind.startswith("settings_")

    def _start(self) -> None:
        loaded = Sources(self.file, (), {}).read()
        self.live = LiveSettings(
            loaded.settings, loaded.origins, loaded.sources, lambda: 0.0, lambda: self.now
        )

        async def recall() -> list[Any]:
            return [from_row(row) for row in self.rows]

        async def start() -> None:
            saved = SavedSettings(Path(self.directory.name))
            self.live.start(self._apply, saved, self, recall)  # type: ignore[arg-type]
            await self.live.recalled()

        self._run(start())
        current = flatten(dump(self.live.current))
        self.engine = {key: current[key] for key in DEFAULTS}  # it is started with them

    async def _apply(self, revision: int, values: dict[str, Any]) -> None:
        if self.refuses:
            self.refuses = False
            raise Refused
        self.engine |= values

    def _run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def _try(self, work: Any) -> tuple[Any, Exception | None]:
        try:
            return self._run(work), None
        except (SettingsError, Unconfirmed, CannotUndo, StaleRevision, Refused) as error:
            return None, error

    @property
    def pending(self) -> Put | None:
        return next((put for put in self.model.puts if put.pending and put.alive), None)

    def _stays_valid(self) -> bool:
        """Whether the model is valid now, and after the revert of what is pending."""
        pending = self.pending
        if not valid(self.model.in_force()):
            return False
        if pending is None:
            return True
        pending.alive = False
        try:
            return valid(self.model.in_force())
        finally:
            pending.alive = True

    @rule(
        changes=CHANGES,
        reset=st.sets(st.sampled_from(sorted(VALUES)), max_size=1),
        persist=st.booleans(),
        waits=st.booleans(),
    )
    def change(self, changes: dict[str, Any], reset: set[str], persist: bool, waits: bool) -> None:
        changes = {key: value for key, value in changes.items() if key not in reset}
        done, error = self._try(
            self.live.change(
                changes,
                self.live.revision,
                ME,
                reset=reset,
                persist=persist,
                revert_after_seconds=10.0 if waits else None,
            )
        )
        before, saved = self.model.in_force(), self.model.live(saved=True)
        effective = {
            key: value
            for key, value in changes.items()
            if before[key] != value or (persist and saved.get(key) != value)
        }
        gone = {key: None for key in reset if key in self.model.live() or key in saved}
        put = Put(self.live.revision, {**effective, **gone}, persist, pending=waits)
        proposed = {**before, **changes, **{key: self.model.base[key] for key in reset}}
        waiting = self.pending
        if not valid(proposed):
            assert isinstance(error, SettingsError)
        elif not put.values:
            assert (done, error) == ({}, None)
        elif waiting is not None and (waits or put.values.keys() & waiting.values.keys()):
            assert isinstance(error, Unconfirmed)
        else:
            self.model.puts.append(put)
            if isinstance(error, Refused) or not self._stays_valid():
                self.model.puts.pop()
                assert isinstance(error, SettingsError | Refused)
            else:
                assert error is None
                assert done.keys() == put.values.keys()

    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        numbers = [put.revision for put in self.model.puts] + list(self.model.undos)
        revision = data.draw(st.sampled_from([None, *numbers]))
        _, error = self._try(self.live.undo(ME, revision))
        puts = self.model.puts
        if revision is None:
            alive = [put for put in puts if put.alive]
            if not alive:
                # An earlier life may have left a value that can still be taken back.
                if error is None:
                    self._forget_kept()
                return
            target, restores = alive[-1], False
        elif revision in self.model.undos:
            target, restores = self.model.undos[revision], True
        else:
            target, restores = next(p for p in puts if p.revision == revision), False
        later = [p for p in puts if p.revision > target.revision and p.alive]
        blocked = any(p.values.keys() & target.values.keys() for p in later)
        stale = restores and self._latest_undo(target) != revision
        if target.alive == restores or blocked or stale:
            assert isinstance(error, CannotUndo)
            return
        was_pending = target.pending
        target.alive, target.pending = restores, False
        if isinstance(error, Refused) or not self._stays_valid():
            target.alive, target.pending = not restores, was_pending
            assert isinstance(error, SettingsError | Refused)
            return
        assert error is None
        if not restores:
            self.model.undos[self.live.revision] = target

    def _latest_undo(self, target: Put) -> int:
        return max(number for number, put in self.model.undos.items() if put is target)

    def _forget_kept(self) -> None:
        """What an undo over a restart leaves is checked in unit tests; here it is taken over."""
        saved = self.live.state.layers.saved
        self.model.kept = {key: override.value for key, override in saved.items()}

    @precondition(lambda self: self.pending is not None)
    @rule()
    def confirm(self) -> None:
        put = self.pending
        assert put is not None
        assert self._try(self.live.confirm(put.revision, ME)) == (None, None)
        put.pending = False

    @rule(seconds=st.sampled_from([4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        put = self.pending
        deadline = self.live.state.pending.deadline if self.live.state.pending else None
        self.now += seconds
        _, error = self._try(self.live.revert_if_due())
        if put is not None and deadline is not None and self.now >= deadline and error is None:
            put.alive = put.pending = False

    @rule(file=st.dictionaries(st.sampled_from([HIGH, WAITING]), st.nothing() | MARKS, max_size=1))
    def reload(self, file: dict[str, Any]) -> None:
        file = {HIGH: file[HIGH]} if HIGH in file else {}
        self.file.write_text("".join(f"{key}: {value}\n" for key, value in file.items()))
        before = self.model.in_force()
        results, error = self._try(self.live.reload(ME))
        old = self.model.base
        self.model.base = {**DEFAULTS, **file}
        if not valid(self.model.base) or error is not None or not self._stays_valid():
            assert error is not None
            self.model.base = old
            return
        now = self.model.in_force()
        assert {k for k, each in results.items() if each["result"] == "applied"} == {
            key for key in DEFAULTS if now[key] != before[key]
        }

    @rule()
    def refuse_the_next(self) -> None:
        self.refuses = True

    @rule()
    def restart(self) -> None:
        self._run(self.live.stop())
        self.refuses = False
        kept = self.model.live(saved=True)
        try:
            loaded = flatten(dump(Sources(self.file, (), {}).read().settings))
        except SettingsError:
            self.file.write_text("")
            loaded = DEFAULTS
        base = {key: loaded[key] for key in DEFAULTS}
        if not valid({**base, **kept}):
            kept = {}
        revision = self.live.revision
        self.model = Model(base=base, kept=kept)
        self._start()
        assert self.live.revision > revision

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "live"):
            return
        current = flatten(dump(self.live.current))
        wanted = self.model.in_force()
        assert {key: current[key] for key in DEFAULTS} == wanted
        saved = {k: o.value for k, o in self.live.state.layers.saved.items()}
        assert saved == self.model.live(saved=True)
        assert SavedSettings(Path(self.directory.name)).read()[1].keys() == saved.keys()
        assert self.live.state.layers.in_force.keys() == self.model.live().keys()
        told = [row["revision"] for row in self.rows]
        assert told == sorted(set(told))
        assert told[-1] == self.live.revision
        waiting = self.live.state.pending
        assert (waiting is None) == (self.pending is None)
        assert all(asdict(row)["revision"] in told for row in self.live.state.rows)
        if not self.live._unsure:
            assert self.engine == wanted


SettingsMachine.TestCase.settings = settings(
    max_examples=2000 if DEEP else 40, stateful_step_count=25, deadline=None
)
test_settings_agree_with_the_model = SettingsMachine.TestCase
