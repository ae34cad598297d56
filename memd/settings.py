"""Settings in force and how they came about: changes, undo, reload, revert unless confirmed.

Three layers, later wins: what the sources say (memd.config_sources), values kept from earlier lives
(memd.settings_saved), live changes. A change is validated as a whole tree, applied by the engine,
and only then recorded. What follows from what is decided in memd.settings_state; here are the
effects. Used on the event loop; files are read and written on threads.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from memd.config import LIVE_KEYS, Settings, dump, flatten
from memd.config_sources import Loaded, Origin, Sources
from memd.settings_history import Kind, Life, Outcome, Revision, Source, change_of, undoable
from memd.settings_journal import Journal, Recorder
from memd.settings_saved import SavedError, SavedSettings, take_up
from memd.settings_state import (
    Author,
    Changes,
    Pending,
    Reload,
    StaleRevision,
    State,
    Unconfirmed,
    reload_results,
)

RETRY_SECONDS = 1.0
RECALL_SECONDS = 5.0
_log = logging.getLogger(__name__)

Apply = Callable[[int, dict[str, Any]], Awaitable[object]]  # revision, dotted key -> value
Recall = Callable[[], Awaitable[Iterable[Revision]]]


class LiveSettings:
    """The tree in force and its history.

    Args:
        initial: As loaded at the start, without values kept from earlier lives.
        origins: Which source gave each key; default: none of them did.
        sources: What a reload reads; default: the environment.
        clock: Unix seconds, for what is stored.
        monotonic: Seconds, for what is waited for.
    """

    def __init__(
        self,
        initial: Settings,
        origins: Mapping[str, Origin] | None = None,
        sources: Sources | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._lock = asyncio.Lock()
        self._sources = sources or Sources()
        self._saved: SavedSettings | None = None
        self._apply: Apply | None = None
        self._recalled = asyncio.Event()
        self._recalling: asyncio.Task[None] | None = None
        self._reverting: asyncio.Task[None] | None = None
        self._reloading: set[asyncio.Task[None]] = set()
        self._unsure: set[str] = set()  # the engine may hold another value than is in force
        now = clock()
        base = flatten(dump(initial))
        start = Revision(1, now, "local", "start", "start", {}, source="file")
        self.state = State(base, initial, (start,), Life(1))
        self.origins: dict[str, Origin] = {**dict.fromkeys(base, "default"), **(origins or {})}
        self.since = dict.fromkeys(base, now)  # Unix seconds, of what the sources say
        self.last_reload = Reload(now, None, now)
        self._recorder = Recorder()

    @property
    def current(self) -> Settings:
        """The tree in force."""
        return self.state.settings

    @property
    def revision(self) -> int:
        """Of the settings in force."""
        return self.state.revision

    @property
    def counts(self) -> Mapping[tuple[str, Source, Outcome], int]:
        """How often each live key was changed, by source and outcome."""
        return self._recorder.counts

    @property
    def sources(self) -> Sources:
        """What a reload reads."""
        return self._sources

    def start(
        self,
        apply: Apply,
        saved: SavedSettings | None = None,
        journal: Journal | None = None,
        recall: Recall | None = None,
    ) -> None:
        """Take up what earlier lives left, and be ready for changes. Reads one small file.

        Args:
            apply: Puts values in force; when it raises, nothing has changed.
            saved: Keeps values over a restart; None: nothing is kept.
            journal: Is told of each revision.
            recall: Reads the revisions of earlier lives, oldest first. Changes wait for it, for
                RECALL_SECONDS at most; without them the history begins with this life.
        """
        self._apply, self._saved, self._recorder.journal = apply, saved, journal
        if saved is not None:
            self.state = take_up(saved, self.state)
        self._recalling = asyncio.create_task(self._recall(recall))

    async def stop(self) -> None:
        """End what waits; a change that is not confirmed ends with the daemon."""
        ours = (self._recalling, self._reverting, *self._reloading)
        tasks = [task for task in ours if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._saved is not None:
            await self._saved.stop()

    async def _recall(self, recall: Recall | None) -> None:
        try:
            async with asyncio.timeout(RECALL_SECONDS):
                rows = [] if recall is None else list(await recall())
            if rows:
                self.state = self.state.recalling(rows)
        except Exception as error:
            reason = str(error) or f"no answer in {RECALL_SECONDS:g} s"
            _log.warning("earlier revisions of the settings cannot be read: %s", reason)
        finally:
            self._recalled.set()
        self._recorder.record(self.state.rows[-1])
        if self._saved is not None:
            self._saved.save_later(self.revision, self.state.layers.saved)

    async def recalled(self) -> None:
        """Wait until the history is known as far as it can be."""
        await self._recalled.wait()

    async def change(
        self,
        changes: Mapping[str, Any],
        base_revision: int,
        author: Author,
        *,
        reset: Iterable[str] = (),
        persist: bool = False,
        revert_after_seconds: float | None = None,
    ) -> Changes:
        """Put changes in force, all or none.

        Args:
            changes: Dotted keys and values, as people write them.
            base_revision: The revision the author saw.
            author: Recorded.
            reset: Keys whose live values are given up for what the sources say.
            persist: Keep the values over a restart.
            revert_after_seconds: Take them back then, unless they are confirmed.

        Returns:
            What differs now; empty when nothing does, and then there is no new revision.

        Raises:
            StaleRevision: `base_revision` is not the current one.
            SettingsError: see `validate`; or what is pending could no longer be reverted.
            Unconfirmed: see `validate`; or two changes would wait to be confirmed.
            SavedError: the values cannot be kept over a restart.
        """
        reset = tuple(reset)
        await self.recalled()
        async with self._lock:
            if base_revision != self.revision:
                raise StaleRevision(base_revision, self.revision)
            with self._recorder.refusals({*flatten(changes), *reset}, author):
                _, differs = self.state.validate(changes, reset, persist)
                if not differs:
                    return {}
                row, pending = self._row("change", author, differs), self.state.pending
                row = replace(row, persist=persist)
                if revert_after_seconds is not None:
                    if pending is not None:
                        raise Unconfirmed(
                            f"revision {pending.row.revision} waits to be confirmed: one at a time"
                        )
                    row = replace(row, confirm_by=row.time + revert_after_seconds)
                    pending = Pending(row, self._monotonic() + revert_after_seconds)
                return await self._commit(self.state.then(row, pending))

    def preview(
        self, changes: Mapping[str, Any], reset: Iterable[str] = (), persist: bool = False
    ) -> tuple[Settings, Changes]:
        """The tree after changes, and what would differ; nothing is changed.

        Raises:
            SettingsError: `change` would.
            Unconfirmed: `change` would.
        """
        proposed, differs = self.state.validate(changes, reset, persist)
        if differs:
            row = self._row("change", Author("", ""), differs)
            self.state.then(row, self.state.pending)
        return proposed, differs

    async def undo(self, author: Author, revision: int | None = None) -> Changes:
        """Take back a revision; taking back an undo puts its change in force again.

        Args:
            author: Recorded.
            revision: None: the latest change that is in effect.

        Raises:
            CannotUndo: there is none, or later changes are in the way.
            SettingsError: what would be in force then is not valid.
            SavedError: the values cannot be kept over a restart.
        """
        await self.recalled()
        async with self._lock:
            state = self.state
            target = undoable(state.rows, state.life, revision)
            touched = change_of(state.rows, target).changes
            with self._recorder.refusals(touched, author):
                row = self._row("undo", author, {key: {} for key in touched}, target.revision)
                return await self._commit(state.then(row, state.pending_without(row)))

    async def confirm(self, revision: int, author: Author) -> None:
        """Let a change stay that would revert by itself.

        Raises:
            Unconfirmed: this revision does not wait to be confirmed.
            SavedError: its values cannot be kept over a restart; it still waits.
        """
        await self.recalled()
        async with self._lock:
            pending = self.state.pending
            if pending is None or pending.row.revision != revision:
                raise Unconfirmed(f"revision {revision} does not wait to be confirmed")
            after = replace(self.state, pending=None).settled()
            await self._save(after)
            self.state = after
            self._watch_over(None)
            self._recorder.tell("settings_confirm", f"revision {revision} is confirmed", author)

    async def revert_if_due(self) -> None:
        """Take back what was not confirmed in time. Called by itself."""
        async with self._lock:
            pending = self.state.pending
            if pending is None or self._monotonic() < pending.deadline:
                return
            author = Author("memd", "not confirmed in time", "schedule")
            touched: Changes = {key: {} for key in pending.row.changes}
            row = self._row("revert", author, touched, pending.row.revision)
            await self._commit(self.state.then(row, None))

    async def reload(self, author: Author) -> dict[str, dict[str, Any]]:
        """Read the sources again and put what is live in force, all or nothing.

        Returns:
            For each key {"result", "old", "new"}; result: `applied`; `unchanged`; `needs_restart`,
            where `new` is what the sources say; `overridden` by a live value, likewise.

        Raises:
            SettingsError: a source cannot be read, or the tree would not be valid. As with every
                other error, the former values stay.
        """
        await self.recalled()
        async with self._lock:
            now = self._clock()
            try:
                loaded = await asyncio.to_thread(self._sources.read)
                results = await self._take(loaded, author)
            except Exception as error:
                self.last_reload = replace(
                    self.last_reload, time=now, error=str(error) or repr(error)
                )
                _log.error("settings are not reloaded, the former ones stay: %s", error)
                self._recorder.tell(
                    "settings_reload_failed", f"settings are not reloaded: {error}", author
                )
                raise
            self.last_reload = Reload(now, None, now)
            applied = [key for key, each in results.items() if each["result"] == "applied"]
            message = f"settings reloaded: {', '.join(applied) or 'nothing differs'}"
            _log.info("%s", message)
            self._recorder.tell("settings_reload", message, author)
            return results

    def reload_later(self) -> asyncio.Task[None]:
        """Reload at once, in the background: for SIGHUP, which nobody hears an answer to."""

        async def reload() -> None:
            with contextlib.suppress(Exception):  # which is logged
                await self.reload(Author("local", "SIGHUP", "file"))

        task = asyncio.create_task(reload())
        self._reloading.add(task)
        task.add_done_callback(self._reloading.discard)
        return task

    async def _take(self, loaded: Loaded, author: Author) -> dict[str, dict[str, Any]]:
        """Put in force what is live of freshly read sources."""
        said, before = flatten(dump(loaded.settings)), self.state
        base = {key: said[key] if key in LIVE_KEYS else old for key, old in before.base.items()}
        row = self._row("reload", replace(author, source="file"), {})
        after = before.then(row, before.pending, base)
        if after.rows[-1].changes:
            await self._commit(after)
        else:
            self.state = replace(before, base=base)
        for key in LIVE_KEYS:
            self.origins[key] = loaded.origins[key]
            if base[key] != before.base[key]:
                self.since[key] = row.time
        return reload_results(before, self.state, said)

    def _row(
        self, kind: Kind, author: Author, changes: Changes, undoes: int | None = None
    ) -> Revision:
        number, who, reason = self.revision + 1, author.who, author.reason
        return Revision(
            number, self._clock(), who, reason, kind, changes, undoes, source=author.source
        )

    async def _commit(self, after: State) -> Changes:
        """Save, apply, then hold a state; nothing has changed when it raises."""
        assert self._apply is not None, "start() comes first"
        row = after.rows[-1]
        in_force = flatten(dump(after.settings))
        differs = {key for key, pair in row.changes.items() if pair["new"] != pair["old"]}
        values = {key: in_force[key] for key in sorted(differs | self._unsure)}
        await self._save(after)
        try:
            if values:
                await self._apply(row.revision, values)
        except BaseException:
            self._unsure |= differs
            if self._saved is not None:
                former = self._saved.save_later(row.revision, self.state.layers.saved)
                await asyncio.shield(former)
            raise
        self._unsure.clear()
        waits = after.pending is not self.state.pending
        self.state = after
        if waits:
            self._watch_over(after.pending)
        self._recorder.record(row)
        return row.changes

    async def _save(self, after: State) -> None:
        """Keep what shall outlast this life; only where values are concerned it must succeed."""
        if self._saved is None:
            return
        former, values = self.state.layers.saved, after.layers.saved
        if values == former:
            self._saved.save_later(after.revision, values)
            return
        try:
            await self._saved.save(after.revision, values)
        except SavedError:
            self._saved.save_later(after.revision, former)
            raise

    def _watch_over(self, pending: Pending | None) -> None:
        """Have what is pending reverted in time, and nothing else."""
        if self._reverting is not None and self._reverting is not asyncio.current_task():
            self._reverting.cancel()
        self._reverting = None if pending is None else asyncio.create_task(self._revert(pending))

    async def _revert(self, pending: Pending) -> None:
        """Wait for the deadline, and then for an engine that takes the values."""
        while self.state.pending is pending:
            await asyncio.sleep(max(0.0, pending.deadline - self._monotonic()))
            try:
                await self.revert_if_due()
            except Exception as error:
                _log.warning("revision %d does not revert yet: %s", pending.row.revision, error)
                await asyncio.sleep(RETRY_SECONDS)
