"""The daemon: builds the HTTP side, owns the engine process, and lives from start to drain.

The composition root of the api process. Nothing else starts processes or handles signals.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import uvicorn
import uvloop

from memd import __version__
from memd.api.app import create_app
from memd.api.engine_client import EngineClient
from memd.api.model import ServedModel
from memd.api.service import Service
from memd.config import Settings, dump
from memd.engine.messages import Shutdown, Start
from memd.engine.port import ZmqApiPort
from memd.errors import ModelError
from memd.models.chat_template import load_chat_template
from memd.models.hub import read_config, resolve
from memd.models.tokenizer import load_tokenizer
from memd.observe.metrics import LogCounter, Metrics
from memd.settings import LiveSettings

_ENGINE_EXIT_SECONDS = 5.0
_STREAM_END_SECONDS = 5.0
_LAST_WORDS_SECONDS = 0.2
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def serve(settings: Settings) -> int:
    """Serve until a signal comes.

    Returns:
        Exit code: 0 after a drain; 1 when the address is taken, the model cannot be loaded or the
        engine failed.
    """
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        listener = listen(settings.server.host, settings.server.port)
    except OSError as error:
        address = f"{settings.server.host}:{settings.server.port}"
        _complain(f"cannot listen at {address}: {error.strerror}")
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="memd-") as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(Daemon(settings, listener, Path(directory)).run())


class Daemon:
    """One life of a daemon.

    Args:
        settings: As loaded; the live part may change later.
        listener: Bound socket for HTTP.
        directory: Private; holds the socket between the processes.
    """

    def __init__(self, settings: Settings, listener: socket.socket, directory: Path) -> None:
        self._settings = settings
        self._listener = listener
        self._address = f"ipc://{directory / 'engine'}"
        self._drain = asyncio.Event()
        self._leave_now = asyncio.Event()

    async def run(self) -> int:
        """Start, serve, drain. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        port = ZmqApiPort(self._address)
        client = EngineClient(port)
        name = served_name(self._settings)
        metrics = Metrics(name, client)
        service = Service(name, client, LiveSettings(self._settings), metrics)
        server = _Server(
            uvicorn.Config(
                create_app(service),
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        engine = await _spawn_engine(self._address)
        receiving = asyncio.create_task(client.run())
        tasks = [
            receiving,
            asyncio.create_task(_watch(engine, receiving, client)),
            asyncio.create_task(self._load(service)),
        ]
        with _counting_logs(metrics):
            try:
                return await self._live(service)
            finally:
                server.should_exit = True
                server.force_exit = self._leave_now.is_set()
                await asyncio.wait((serving,), timeout=_STREAM_END_SECONDS)
                for task in (*tasks, serving):
                    task.cancel()
                await asyncio.gather(*tasks, serving, return_exceptions=True)
                if client.ready is not None and not self._leave_now.is_set():
                    port.send(Shutdown())
                    await _first_of(_ended(engine, _ENGINE_EXIT_SECONDS), self._leave_now.wait())
                await _kill(engine)
                port.close()

    def _on_signal(self) -> None:
        """The first signal drains, a second one ends at once."""
        (self._leave_now if self._drain.is_set() else self._drain).set()

    async def _load(self, service: Service) -> None:
        """Tokenizer and template here, then everything else in the engine."""
        client = service.engine
        client.set_stage("tokenizer", 0.0)
        try:
            model, eos_token_ids = await _in_thread(
                lambda: load_model(self._settings, service.name)
            )
        except ModelError as error:
            client.fail(str(error))
            return
        except Exception:
            _log.exception("the tokenizer or chat template cannot be loaded")
            client.fail("the tokenizer or chat template cannot be loaded; see the log")
            return
        service.model = model
        client.set_stage("engine", 0.0)
        revision = service.live.revision
        client.start(Start(dump(self._settings), revision, model.vocab_size, eos_token_ids))

    async def _live(self, service: Service) -> int:
        """From the start to the end of the drain."""
        client = service.engine
        await _first_of(client.settled.wait(), self._drain.wait())
        if client.failure is not None:
            _complain(client.failure)
            return 1
        if not self._drain.is_set():
            sys.stdout.write(f"memd serves {service.name} at {_url(self._listener)}\n")
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


class _Server(uvicorn.Server):
    """Leaves signals to the daemon."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A bound and listening socket; port 0: any free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    # Connections inherit it; the event loop sets it only on sockets that name their protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


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


async def _spawn_engine(address: str) -> Process:
    """Start the engine in its own session, so that a terminal's Ctrl-C reaches the daemon only."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "memd.engine.process"),
        *("--address", address, "--parent", str(os.getpid())),
        start_new_session=True,
        # How long torch's threads spin at a barrier before they sleep. The default, 30 times this,
        # makes a decode step 10 % faster alone and several times slower beside a busy process.
        env={"GOMP_SPINCOUNT": "10000", **os.environ},
    )


async def _watch(engine: Process, receiving: asyncio.Task[None], client: EngineClient) -> None:
    """Tell the client when nothing more can come from the engine."""
    exited = asyncio.create_task(engine.wait())
    await asyncio.wait((exited, receiving), return_when=asyncio.FIRST_COMPLETED)
    if receiving.done():
        _log.error("reading from the engine failed", exc_info=receiving.exception())
        client.fail("the engine's messages cannot be read; see the log")
        return
    # What it said last may still be on its way.
    await asyncio.sleep(_LAST_WORDS_SECONDS)
    client.fail(f"the engine process ended with code {exited.result()}")


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


async def _ended(engine: Process, timeout_seconds: float) -> None:
    async with asyncio.timeout(timeout_seconds):
        await engine.wait()


async def _kill(engine: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        engine.kill()
    await engine.wait()


async def _first_of(*works: Awaitable[object]) -> None:
    """Wait for one of them, and cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
