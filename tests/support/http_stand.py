"""A daemon's HTTP side over real sockets, and a scripted engine at the other end of a real port."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import tokenizers

from memd.api.app import create_app
from memd.api.connection import HttpServer
from memd.api.engine_client import EngineClient
from memd.api.model import ServedModel
from memd.api.service import Service
from memd.api.settings_apply import settings_applier
from memd.config import Settings
from memd.engine.messages import (
    Abort,
    ApplySettings,
    ArmFaults,
    Describe,
    Explain,
    Loading,
    Output,
    PoolCommand,
    Preempt,
    PrefixCommand,
    Ready,
    Reply,
    SetPriority,
    StepReport,
    Submit,
    TokenLogprobs,
)
from memd.engine.port import ZmqApiPort, ZmqEnginePort
from memd.engine.snapshot_types import ElasticSnapshot, EngineSnapshot, Histogram, PoolSnapshot
from memd.keys import KeysFile
from memd.listen import listen
from memd.models.chat_template import ChatTemplate
from memd.models.tokenizer import Tokenizer
from memd.observe.metrics import LogCounter, Metrics
from memd.pool.counters import PATHS
from memd.settings import LiveSettings
from memd.store.database import database_of
from memd.store.store import Store

BOS, END = 256, 257
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
Script = Callable[[Submit], Iterator[Output | float]]  # a float: seconds of silence


def byte_tokenizer(adds_bos: bool = False) -> Tokenizer:
    """One token a byte, its id the byte; 256 and 257 are special."""
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in alphabet)
    vocabulary = {chr(byte): byte for byte in alphabet}
    vocabulary |= {chr(256 + index): byte for index, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|bos|>", "<|end|>"])
    return Tokenizer(backend, BOS, adds_bos, [END])


def say(text: str | bytes, finish: str | None = None, pause: float = 0.0) -> Script:
    """A script that says a text byte by byte, ended by the end token or by max_tokens."""
    said = text.encode() if isinstance(text, str) else text

    def script(submit: Submit) -> Iterator[Output | float]:
        ids = [*said, END] if finish is None else [*said]
        params = submit.sampling
        if params.max_tokens == 0:
            yield _output(submit, [], 0, "length")
            return
        ids = ids[: params.max_tokens]
        for at, token in enumerate(ids):
            reason = None
            if at == len(ids) - 1:
                reason = "stop" if token == END else finish or "length"
            yield _output(submit, [token], at, reason)
            if pause:
                yield pause

    return script


def _output(submit: Submit, ids: list[int], at: int, reason: str | None) -> Output:
    params, first = submit.sampling, at == 0
    logprobs = prompt_logprobs = None
    if params.logprobs is not None:
        logprobs = [entry(token, params.logprobs) for token in ids]
    if first and params.prompt_logprobs is not None:
        prompt_logprobs = [
            None,
            *(entry(t, params.prompt_logprobs) for t in submit.prompt_tokens[1:]),
        ]
    return Output(
        submit.request_id,
        ids,
        logprobs,
        prompt_logprobs,
        cached_tokens=3 if first else None,
        queue_seconds=0.0 if first else None,
        finish_reason=reason,
    )


def entry(token: int, alternatives: int) -> TokenLogprobs:
    """Logprobs that tell the token: -token/100; alternatives are the ids that follow."""
    top = [((token + k) % 256, -token / 100 - k) for k in range(alternatives)]
    return TokenLogprobs(-token / 100, top)


def empty_histogram() -> Histogram:
    return Histogram([0.1, 1.0], [0, 0, 0], 0.0)


def pool_snapshot(**changes: Any) -> PoolSnapshot:
    """64 pages, 10 active, 40 cached."""
    values: dict[str, Any] = dict.fromkeys(PoolSnapshot.__struct_fields__, 0)
    values |= {
        "capacity_pages": 64,
        "active_pages": 10,
        "cached_pages": 40,
        "free_pages": 14,
        "committed_blocks": 3,
        "capacity_blocks": 4,
        "reclaiming": False,
        "watermark_high": 0.9,
        "watermark_low": 0.7,
        "watermark_crossings": {"high.up": 2},
        "above_watermark_seconds": {},
        "allocations": {"free": 50},
        "evicted_pages": {"watermark": 7},
        "offloaded_pages": {},
        "dropped_pages": {"recency": 3},
        "transfers": {path: {"ok": 0, "failed": 0} for path in PATHS},
        "disk_dropped_pages": {},
        "disk_rejected_files": {},
        "disk_fault": None,
        "transferred_bytes": {},
        "transfers_under_way": {},
        "prefetched_pages": {},
        "prefix_hit_tokens": {"device": 5},
        "prefix_miss_tokens": {"cold": 9},
        "audit_runs": {"clean": 0, "leak": 0},
    }
    values |= {name: empty_histogram() for name in values if name.endswith("_seconds")}
    values["above_watermark_seconds"] = {}
    values["transfer_seconds"] = {}
    values["pins"] = {}
    return PoolSnapshot(**(values | changes))


def elastic_snapshot(**changes: Any) -> ElasticSnapshot:
    """Of the pool above; nothing is fragmented."""
    values: dict[str, Any] = {
        "limit_pages": 64,
        "max_model_len": 200,
        "target_pages": 64,
        "limit_waits_for": None,
        "fragmentation_ratio": 0.0,
        "max_fragmentation_ratio": 0.15,
        "empty_blocks": 0,
        "defrag_running": False,
        "defrag_runs": {"admin": {"completed": 2, "failed": 1}},
        "defrag_moved_pages": 30,
        "defrag_moved_bytes": 30 * 1024,
        "defrag_last_run": None,
        "defrag_step_seconds": ([0.1, 1.0], [3, 0, 0], 0.1),
        "grown_blocks": {"demand": 5, "ahead": 1},
        "shrunk_blocks": {"idle": 3},
        "under_pressure": False,
        "device_free_bytes": 10**9,
    }
    return ElasticSnapshot(**(values | changes))


def engine_snapshot(running: int = 0, revision: int = 1, **pool: Any) -> EngineSnapshot:
    return EngineSnapshot(
        elastic=elastic_snapshot(),
        revision=revision,
        steps={"decode": 4},
        replayed_steps={"decode": 3},
        shared_prefix_steps=2,
        step_seconds={"decode": empty_histogram()},
        last_step_age_seconds=None,
        running=running,
        waiting={},
        finished={"stop": 1},
        preemptions=0,
        recomputed_tokens=0,
        prompt_tokens={"computed": 8},
        generated_tokens=4,
        queue_seconds=empty_histogram(),
        stall_seconds={},
        nan_logits=0,
        allocator_bytes=None,
        wait_seconds=0.25,
        settings={"memory.watermark.high": 0.9},
        pool=pool_snapshot(**pool),
        tenants={},
    )


class ScriptedEngine(threading.Thread):
    """Answers Submits with what `script` yields, one output of each sequence a round."""

    def __init__(self, address: str, ready: Ready | None) -> None:
        super().__init__(daemon=True)
        self.script: Script = say("Hello!")
        self.received: list[Any] = []
        self.refuse: str | None = None  # error of every Reply
        self.silent = False
        self.ready = ready
        self.outbox: list[Any] = []
        self._address = address
        self._running: dict[str, tuple[Iterator[Output | float], float]] = {}
        self._stop_event = threading.Event()

    def run(self) -> None:
        port = ZmqEnginePort(self._address)
        port.send(*([self.ready] if self.ready else [Loading("weights", 0.25)]))
        port.send(StepReport(snapshot=self.snapshot()))
        while not self._stop_event.is_set():
            for message in port.receive(0.0 if self._running else 0.002):
                self.received.append(message)
                if not self.silent:
                    self._take(message, port)
            while self.outbox:
                port.send(self.outbox.pop(0))
            outputs = self._step()
            if outputs:
                port.send(StepReport(outputs, snapshot=self.snapshot()))
            elif self._running:
                time.sleep(0.002)
        port.close()

    def snapshot(self) -> EngineSnapshot:
        """With the lengths that were told when it was ready."""
        report = engine_snapshot(len(self._running))
        if self.ready is None:
            return report
        pages, longest = self.ready.pool["capacity_pages"], self.ready.max_model_len
        elastic = elastic_snapshot(limit_pages=pages, max_model_len=longest)
        return msgspec.structs.replace(report, elastic=elastic)

    def stop(self) -> None:
        self._stop_event.set()
        self.join(60)

    def of(self, kind: type) -> list[Any]:
        """The messages of one kind that arrived."""
        return [message for message in self.received if isinstance(message, kind)]

    def _take(self, message: Any, port: ZmqEnginePort) -> None:
        match message:
            case Submit():
                self._running[message.request_id] = (self.script(message), 0.0)
            case Abort():
                self._running.pop(message.request_id, None)
            case (
                PoolCommand()
                | PrefixCommand()
                | Describe()
                | Explain()
                | ApplySettings()
                | Preempt()
                | SetPriority()
                | ArmFaults()
            ):
                result: dict[str, Any] = {
                    "done": True,
                    "requests": [],
                    "total": 0,
                    "tenants": [""],
                    "columns": {"block": [], "age_seconds": []},
                    "found": True,
                    "prefixes": [],
                    "injected": {},
                }
                reply = Reply(message.command_id, result)
                if self.refuse:
                    reply = Reply(message.command_id, error=self.refuse)
                port.send(StepReport(replies=[reply]))

    def _step(self) -> list[Output]:
        outputs = []
        for name, (script, due) in list(self._running.items()):
            if time.monotonic() < due:
                continue
            produced = next(script, None)
            if isinstance(produced, float):
                self._running[name] = (script, time.monotonic() + produced)
                continue
            if produced is None or produced.finish_reason is not None:
                del self._running[name]
            if produced is not None:
                outputs.append(produced)
        return outputs


class Stand:
    """The HTTP side of a daemon on a loopback port, its loop in a thread."""

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        capacity_pages: int,
        loaded: bool,
    ) -> None:
        self.ready = Ready(
            4321,
            max_model_len,
            {"architecture": "scripted"},
            None,
            {
                "page_tokens": 16,
                "page_bytes": 1024,
                "block_bytes": 16384,
                "block_waste_bytes": 0,
                "packed_page_bytes": 0,
                "packed_pages_per_block": 0,
                "packed_block_waste_bytes": 0,
                "pages_per_block": 16,
                "capacity_pages": capacity_pages,
                "elastic": True,
                "elastic_reason": None,
                "limit_base_bytes": 4 * 16384,
                "most_pages": 4096,
            },
        )
        address = f"ipc://{directory / 'engine'}"
        self.settings = settings
        self.model = ServedModel(
            name="tiny",
            tokenizer=tokenizer,
            template=ChatTemplate(TEMPLATE, {}) if tokenizer else None,
            vocab_size=258,
            fingerprint="fp_test",
            created=1,
        )
        self.engine = ScriptedEngine(address, self.ready if loaded else None)
        self._address = address
        self._state = directory / "state"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "Stand":
        self._thread.start()
        assert self._started.wait(60)
        self.engine.start()
        self.http = httpx2.Client(base_url=self.url, timeout=60)
        deadline = time.monotonic() + 5
        while self.client.snapshot is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.engine.stop()
        self.loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(60)

    async def _serve(self) -> None:
        self.loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        port = ZmqApiPort(self._address)
        self.client = EngineClient(port)
        live = LiveSettings(self.settings)
        live.start(settings_applier(self.client))
        metrics = Metrics("tiny", self.client, live)
        path = self.settings.server.keys_file
        keys = KeysFile(path) if path else None
        self.store = Store(database_of(self.settings.history, self._state), self.settings.history)
        self.service = Service("tiny", self.client, live, metrics, self.store, keys, self.model)
        self.store.start()
        counter = LogCounter(metrics)
        logging.getLogger().addHandler(counter)
        listener = listen("127.0.0.1", 0)
        server = HttpServer(create_app(self.service), self.settings.server)
        receiving = asyncio.create_task(self.client.run())
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._started.set()
        await self._ended.wait()
        server.should_exit = server.force_exit = True
        await serving
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        await live.stop()
        await self.store.stop(5.0)
        port.close()
        logging.getLogger().removeHandler(counter)

    def on_loop(self, call: Callable[[], object]) -> None:
        """Run something on the server's loop and wait for it."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (call(), done.set()))
        assert done.wait(60)

    def complete(self, **body: Any) -> httpx2.Response:
        return self.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", **body})

    def chat(self, **body: Any) -> httpx2.Response:
        messages = [{"role": "user", "content": "hi"}]
        return self.http.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": messages, **body}
        )

    def sequence_of(self, response: httpx2.Response) -> Submit:
        """The first Submit of an answered request."""
        prefix = response.json()["id"]
        return next(s for s in self.engine.of(Submit) if s.request_id == f"{prefix}-0")

    def wait_for(self, condition: Callable[[], object], seconds: float = 60.0) -> bool:
        """Whether a condition becomes true in time."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)
        return bool(condition())


def sse(text: str) -> list[str]:
    """The data of each event."""
    return [line[6:] for line in text.splitlines() if line.startswith("data: ")]
