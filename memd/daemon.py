"""The daemon: builds the HTTP side, owns the engine process, and lives from start to drain.

The composition root of the api process. Nothing else starts processes or handles signals.
"""

import asyncio
import contextlib
import hashlib
import logging
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import uvloop

from memd import __version__
from memd.api.app import create_app
from memd.api.connection import HttpServer
from memd.api.engine_client import EngineClient
from memd.api.model import ServedModel
from memd.api.service import Service
from memd.config import Settings, dump
from memd.engine.messages import Start
from memd.errors import ModelError
from memd.keys import KeysError, KeysFile
from memd.listen import Doors, ListenError, listening
from memd.models.chat_template import load_chat_template
from memd.models.hub import read_config, resolve
from memd.models.tokenizer import load_tokenizer
from memd.observe.metrics import LogCounter, Metrics
from memd.settings import LiveSettings
from memd.supervisor import Supervisor

_STREAM_END_SECONDS = 5.0
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def serve(settings: Settings) -> int:
    """Serve until a signal comes.

    Returns:
        Exit code: 0 after a drain; 1 when an address is taken, the keys cannot be read, the model
        cannot be loaded or the engine failed.
    """
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        with listening(settings.server) as doors:
            return _serve_at(doors, settings)
    except (ListenError, KeysError) as error:
        _complain(str(error))
        return 1


def _serve_at(doors: Doors, settings: Settings) -> int:
    path, keys = settings.server.keys_file, None
    if path is not None:
        keys = KeysFile(path.expanduser())
        keys.read()
    with (
        tempfile.TemporaryDirectory(prefix="memd-") as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(Daemon(settings, doors, keys, Path(directory)).run())


class Daemon:
    """One life of a daemon.

    Args:
        settings: As loaded; the live part may change later.
        doors: Where it listens for HTTP.
        keys: The API keys in force; None: none are asked for.
        directory: Private; holds the sockets between the processes.
    """

    def __init__(
        self, settings: Settings, doors: Doors, keys: KeysFile | None, directory: Path
    ) -> None:
        self._settings = settings
        self._doors = doors
        self._keys = keys
        self._directory = directory
        self._drain = asyncio.Event()
        self._leave_now = asyncio.Event()
        self._loaded = asyncio.Event()
        self._eos_token_ids: list[int] = []

    async def run(self) -> int:
        """Start, serve, drain. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        client = EngineClient()
        name = served_name(self._settings)
        live = LiveSettings(self._settings)
        metrics = Metrics(name, client, live)
        service = Service(name, client, live, metrics, self._keys)
        server = HttpServer(create_app(service), self._settings.server)
        serving = asyncio.create_task(server.serve(sockets=self._doors.sockets))
        supervisor = Supervisor(
            client,
            self._directory,
            lambda: self._start_message(service),
            self._settings.engine.hang_timeout,
        )
        tasks = [
            serving,
            asyncio.create_task(supervisor.run()),
            asyncio.create_task(self._load(service)),
        ]
        with _counting_logs(metrics):
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

    def _on_signal(self) -> None:
        """The first signal drains, a second one ends at once."""
        (self._leave_now if self._drain.is_set() else self._drain).set()

    async def _load(self, service: Service) -> None:
        """Tokenizer and template here, then everything else in the engine."""
        client = service.engine
        client.set_stage("tokenizer", 0.0)
        try:
            service.model, self._eos_token_ids = await _in_thread(
                lambda: load_model(self._settings, service.name)
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
            sys.stdout.write(f"memd serves {service.name} at {' and '.join(self._doors.urls)}\n")
            sys.stdout.flush()
            await self._drain.wait()
        client.drain()
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
    digest = hashlib.blake2b(f"{__version__} {files} {config}".encode(), digest_size=6)
    model = ServedModel(
        name, tokenizer, template, vocab_size, f"fp_{digest.hexdigest()}", int(time.time())
    )
    return model, sorted(eos_token_ids)


def _complain(message: str) -> None:
    sys.stderr.write(f"memd: {message}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _counting_logs(metrics: Metrics) -> Iterator[None]:
    counter = LogCounter(metrics)
    logging.getLogger().addHandler(counter)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(counter)


async def _in_thread(work: Callable[[], Result]) -> Result:
    """Like asyncio.to_thread, on a thread that does not hold up the exit: downloads take long."""
    future: Future[Result] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="load-model", daemon=True).start()
    return await asyncio.wrap_future(future)


async def _first_of(*works: Awaitable[object]) -> None:
    """Wait for one of them, and cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
