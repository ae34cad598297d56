"""The daemon: builds the HTTP side, owns the engine process, and lives from start to drain.

The composition root of the api process. Nothing else starts processes or handles signals.
"""

import asyncio
import contextlib
import gc
import hashlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path

import uvloop

from memd import __version__
from memd.api.app import create_app
from memd.api.connection import HttpServer
from memd.api.engine_client import EngineClient
from memd.api.model import ServedModel
from memd.api.service import Service
from memd.api.settings_apply import settings_applier
from memd.background import in_thread
from memd.chores import build_alerting, build_jobs, trace_retention
from memd.config import Settings, dump, state_dir
from memd.config_sources import Loaded
from memd.engine.messages import Start
from memd.errors import MemdError, ModelError
from memd.jobs import Jobs
from memd.keys import KeysFile
from memd.listen import Doors, inherited_sockets, listening
from memd.models.chat_template import load_chat_template
from memd.models.hub import read_config, resolve
from memd.models.tokenizer import load_tokenizer
from memd.observe.gpu import GpuReader
from memd.observe.metrics import LogCounter, Metrics
from memd.service_manager import ServiceManager, look_at
from memd.settings import LiveSettings
from memd.settings_journal import recall_revisions
from memd.settings_saved import SavedSettings
from memd.stacks import write_stacks, write_stacks_on_signal, write_threads_on_signal
from memd.store.database import Database, database_of
from memd.store.lock import StateLock
from memd.store.store import Store
from memd.supervisor import Supervisor

_STREAM_END_SECONDS = 5.0
_HISTORY_END_SECONDS = 5.0
_log = logging.getLogger(__name__)


def serve(loaded: Loaded) -> int:
    """Serve until a signal comes.

    Args:
        loaded: The settings to begin with, and where they come from.

    Returns:
        Exit code: 0 after a drain; 1 when another daemon has the state directory, an address is
        taken, the keys cannot be read, the model cannot be loaded or the engine failed.
    """
    write_threads_on_signal()
    settings = loaded.settings
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for chatty in ("alembic", "apscheduler"):  # libraries that tell each of their steps
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        with (
            StateLock(state_dir(settings)),
            listening(settings.server, inherited_sockets(os.environ)) as doors,
        ):
            return _serve_at(doors, loaded)
    except MemdError as error:
        _complain(str(error))
        return 1


def _serve_at(doors: Doors, loaded: Loaded) -> int:
    settings = loaded.settings
    path, keys = settings.server.keys_file, None
    if path is not None:
        keys = KeysFile(path.expanduser())
        keys.read()
    database = database_of(settings.history, state_dir(settings))
    with (
        tempfile.TemporaryDirectory(prefix="memd-") as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(Daemon(loaded, doors, keys, database, Path(directory)).run())


class Daemon:
    """One life of a daemon.

    Args:
        loaded: The settings to begin with; the live part may change later.
        doors: Where it listens for HTTP.
        keys: The API keys in force; None: none are asked for.
        database: For the history.
        directory: Private; holds the sockets between the processes.
    """

    def __init__(
        self,
        loaded: Loaded,
        doors: Doors,
        keys: KeysFile | None,
        database: Database,
        directory: Path,
    ) -> None:
        self._live_settings = LiveSettings(loaded.settings, loaded.origins, loaded.sources)
        self._settings = settings = loaded.settings
        self._doors = doors
        self._keys = keys
        self._store = Store(database, settings.history)
        self._directory = directory
        self._drain = asyncio.Event()
        self._leave_now = asyncio.Event()
        self._loaded = asyncio.Event()
        self._manager = ServiceManager.from_environment(os.environ)
        self._eos_token_ids: list[int] = []

    async def run(self) -> int:
        """Start, serve, drain. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        client = EngineClient()
        client.on_event = self._store.add_event
        name = served_name(self._settings)
        live = self._live_settings
        metrics = Metrics(name, client, live)
        store = self._store
        service = Service(name, client, live, metrics, store, self._keys)
        alerting = build_alerting(self._settings, self._doors.urls, metrics, store)
        if alerting is not None:
            alerting.start()
        planned = build_jobs(self._settings, client, metrics, store, alerting)
        kept = trace_retention(service.traces, store, live)
        jobs = Jobs([*planned, service.maps.job(), kept], store)
        service.alerting, service.jobs = alerting, jobs
        metrics.alerts, metrics.jobs = alerting, jobs
        server = HttpServer(create_app(service), self._settings.server)
        serving = asyncio.create_task(server.serve(sockets=self._doors.sockets))
        supervisor = Supervisor(
            client,
            self._directory,
            lambda: self._start_message(service),
            self._settings.engine.hang_timeout,
            store.add_event,
        )
        gpu = metrics.gpu = GpuReader(client, self._settings.telemetry.gpu_every)
        metrics.history = store
        gpu.start()
        store.start()
        saved = SavedSettings(state_dir(self._settings))
        live.start(settings_applier(client), saved, store, lambda: recall_revisions(store))
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        started = {"version": __version__, "pid": os.getpid(), "model": name}
        store.add_event("daemon_start", f"memd {__version__} starts to serve {name}", started)
        write_stacks_on_signal(supervisor.write_stacks)

        def write_all_stacks() -> None:
            write_stacks()
            supervisor.write_stacks()

        service.write_stacks = write_all_stacks
        service.read_engine_stacks = supervisor.read_stacks
        self._manager.start(lambda now: look_at(client, name, now))
        jobs.start()
        tasks = [
            serving,
            asyncio.create_task(supervisor.run()),
            asyncio.create_task(self._load(service)),
        ]
        with _handling_logs(LogCounter(metrics), service.log_tail):
            try:
                return await self._live(service)
            finally:
                server.should_exit = True
                server.force_exit = self._leave_now.is_set()
                await asyncio.wait((serving,), timeout=_STREAM_END_SECONDS)
                if not self._leave_now.is_set():
                    await _first_of(supervisor.stop(), self._leave_now.wait())
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await gpu.stop()
                await live.stop()
                await self._manager.stop()
                await jobs.stop()
                if alerting is not None:
                    await alerting.stop()
                await service.traces.stop()
                await self._stop_store(service)

    async def _stop_store(self, service: Service) -> None:
        uptime = round(time.monotonic() - service.started_at, 3)
        failure = service.engine.failure
        details = {"uptime_seconds": uptime, "failure": failure}
        self._store.add_event("daemon_stop", failure or "memd stops", details)
        await self._store.stop(0.0 if self._leave_now.is_set() else _HISTORY_END_SECONDS)

    def _on_signal(self) -> None:
        """The first signal drains, a second one ends at once."""
        (self._leave_now if self._drain.is_set() else self._drain).set()

    def _on_reload(self) -> None:
        self._manager.reloading()
        reload = self._live_settings.reload_later()
        reload.add_done_callback(lambda _: self._manager.reloaded())

    async def _load(self, service: Service) -> None:
        """Tokenizer and template here, then everything else in the engine."""
        client = service.engine
        client.set_stage("tokenizer", 0.0)
        try:
            service.model, self._eos_token_ids = await in_thread(
                lambda: load_model(self._settings, service.name), "load-model"
            )
        except ModelError as error:
            client.fail(str(error))
            return
        except Exception:
            _log.exception("the tokenizer or chat template cannot be loaded")
            client.fail("the tokenizer or chat template cannot be loaded; see the log")
            return
        client.set_stage("engine", 0.0)
        self._loaded.set()

    async def _start_message(self, service: Service) -> Start:
        """For an engine that starts now."""
        await self._loaded.wait()
        assert service.model is not None
        live, size = service.live, service.model.vocab_size
        return Start(dump(live.current), live.revision, size, self._eos_token_ids)

    async def _live(self, service: Service) -> int:
        """From the start to the end of the drain."""
        client = service.engine
        await _first_of(client.settled.wait(), self._drain.wait())
        if client.failure is not None:
            _complain(client.failure)
            return 1
        if not self._drain.is_set():
            gc.freeze()  # what is loaded stays: no collection, even the one at exit, looks at it
            sys.stdout.write(f"memd serves {service.name} at {' and '.join(self._doors.urls)}\n")
            sys.stdout.flush()
            self._manager.ready()
            await self._drain.wait()
        client.drain()
        self._manager.stopping(self._settings.server.drain_timeout)
        limit = asyncio.sleep(self._settings.server.drain_timeout)
        await _first_of(client.idle.wait(), self._leave_now.wait(), limit)
        client.end_open("the daemon is shutting down", "draining")
        return 1 if client.failure is not None else 0


def served_name(settings: Settings) -> str:
    """The name clients use: as set, else from the model's path."""
    if settings.model.name is not None:
        return settings.model.name
    local = Path(settings.model.path).expanduser()
    if local.is_dir():
        return local.resolve().name
    return local.stem if local.suffix == ".gguf" else settings.model.path


def load_model(settings: Settings, name: str) -> tuple[ServedModel, list[int]]:
    """Read what the api process needs of a model.

    Returns:
        The model, and the ids that end a generation.

    Raises:
        ModelError: files are missing or wrong.
    """
    files = resolve(settings.model.path)
    config = read_config(files)
    tokenizer = load_tokenizer(files, config)
    override = settings.model.chat_template
    template = load_chat_template(files, Path(override).expanduser() if override else None)
    vocab_size, eos_token_ids = config.vocab_size, set(config.eos_token_ids)
    if tokenizer is not None:
        vocab_size = min(vocab_size, tokenizer.vocab_size)
        eos_token_ids |= tokenizer.eos_token_ids
    served = f"{__version__} {files} {config} {settings.model.shared_heads}"
    digest = hashlib.blake2b(served.encode(), digest_size=6)
    model = ServedModel(
        name, tokenizer, template, vocab_size, f"fp_{digest.hexdigest()}", int(time.time())
    )
    return model, sorted(eos_token_ids)


def _complain(message: str) -> None:
    sys.stderr.write(f"memd: {message}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _handling_logs(*handlers: logging.Handler) -> Iterator[None]:
    for handler in handlers:
        logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            logging.getLogger().removeHandler(handler)


async def _first_of(*works: Awaitable[object]) -> None:
    """Wait for one of them, and cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
