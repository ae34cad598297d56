"""What `holds.py` needs of a daemon: its streams, its counts, its settings, its memory."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from daemon_process import serving
from soak_checks import Metrics, read_metrics
from streams import Answer, Target

WAIT_SECONDS = 60.0
STREAM_SECONDS = 600.0
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Scale:
    """How much is asked for; lengths in tokens.

    Args:
        requests: At once.
        prompt, output: Of each request.
        stream_output: Of each of the streams whose engine is killed.
        shared, own: Of the prompts that begin alike.
        large, small: Room of the pool: for everything, and for a twentieth of it.
        filling: Of each of the prompts that fill the pool.
        rates: Arrivals a second of the open loop.
        seconds: That each rate lasts.
        settings: Of the daemon.
    """

    requests: int
    prompt: int
    output: int
    stream_output: int
    shared: int
    own: int
    filling: int
    large: int
    small: int
    rates: tuple[float, ...]
    seconds: float
    settings: tuple[str, ...]


class Stand:
    """A running daemon with a random model.

    Args:
        url: Its address.
        device: Of the engine: cuda or cpu.
        vocabulary: Token ids of the model.
        scale: How much is asked for.
    """

    def __init__(self, url: str, device: str, vocabulary: int, scale: Scale) -> None:
        self.url = url
        self.scale = scale
        self.device = device
        self._vocabulary = vocabulary
        self.http = httpx2.Client(base_url=url, timeout=WAIT_SECONDS)
        self._undisturbed: dict[str, list[Answer]] = {}
        self._target = Target(url, timeout_seconds=STREAM_SECONDS)
        self._threads = ThreadPoolExecutor(4)
        # Whether a text is the same to the bit however it is computed.
        tree = self.get("/admin/v1/settings")["settings"]
        self.invariant = bool(tree["engine"]["batch_invariant"])
        self.model = self.get("/v1/models")["data"][0]["id"]

    def get(self, path: str) -> Any:
        return self.http.get(path).raise_for_status().json()

    def post(self, path: str) -> Any:
        return self.http.post(path, json={}).raise_for_status().json()

    def metrics(self) -> Metrics:
        return read_metrics(self.http.get("/metrics").raise_for_status().text)

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples; 0.0 while there are none."""
        try:
            return self.metrics().total(name, **labels)
        except KeyError:
            return 0.0

    def pool_tokens(self) -> float:
        """Room of the pool."""
        metrics = self.metrics()
        page_tokens = metrics.total("memd_pool_page_tokens")
        return metrics.total("memd_pool_capacity_pages") * page_tokens

    def watermarks(self) -> dict[str, float]:
        """In force, by level."""
        total = self.metrics().total
        return {level: total("memd_pool_watermark_ratio", level=level) for level in ("high", "low")}

    def change(self, **changes: str) -> None:
        """Change live settings; double underscores stand for dots."""
        body = {
            "revision": self.get("/admin/v1/settings")["revision"],
            "reason": "holds",
            "changes": {key.replace("__", "."): value for key, value in changes.items()},
        }
        self.http.patch("/admin/v1/settings", json=body).raise_for_status()

    def prompts(self, count: int, tokens: int, seed: str) -> list[list[int]]:
        """Random token ids."""
        chance = random.Random(seed)
        return [[chance.randrange(self._vocabulary) for _ in range(tokens)] for _ in range(count)]

    def body(self, prompt: list[int], output: int, **more: Any) -> dict[str, Any]:
        """A greedy streamed completion."""
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0,
            **more,
        }

    def start(self, bodies: list[dict[str, Any]]) -> "Future[list[Answer]]":
        """Send requests at once, in a thread."""

        async def streams() -> list[Answer]:
            path = "/v1/completions"
            return await asyncio.gather(*(self._target.stream(path, body) for body in bodies))

        return self._threads.submit(asyncio.run, streams())

    def run(self, bodies: list[dict[str, Any]]) -> list[Answer]:
        """Send requests at once and wait for their answers."""
        return self.start(bodies).result()

    def undisturbed(self, name: str, bodies: list[dict[str, Any]]) -> list[Answer]:
        """The answers to requests while nothing else happens; they are run once."""
        if name not in self._undisturbed:
            self._undisturbed[name] = self.run(bodies)
        return self._undisturbed[name]

    def wait(self, met: Callable[[], object], what: str) -> float:
        """Seconds until something is so; SystemExit when it does not become so."""
        began_at = time.monotonic()
        while not met():
            if time.monotonic() - began_at > WAIT_SECONDS:
                raise SystemExit(f"not within {WAIT_SECONDS:g} s: {what}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began_at

    def engine_pid(self) -> int | None:
        pid = self.get("/admin/v1/status")["engine"]["pid"]
        return None if pid is None else int(pid)

    def kill_engine(self) -> float:
        """Kill the engine; seconds until another serves."""
        former = self.engine_pid()
        assert former is not None
        os.kill(former, signal.SIGKILL)
        return self.wait(lambda: self.engine_pid() not in (None, former), "another engine serves")

    def memory_bytes(self) -> int:
        """Memory in use: of the device as its driver tells, or resident of the engine on a CPU."""
        if self.device == "cpu":
            status = Path(f"/proc/{self.engine_pid()}/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
            return int(line.split()[1]) * 1024
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)

    def close(self) -> None:
        self.http.close()
        self._threads.shutdown()


@contextmanager
def standing(
    directory: Path, model: Path, device: str, vocabulary: int, scale: Scale, *settings: str
) -> Iterator[Stand]:
    """A daemon for the length of the block; its log is the file `log` in the directory."""
    directory.mkdir()
    given = (f"engine.device={device}", f"memory.limit={scale.large} tokens", *scale.settings)
    with serving(directory, str(model), *given, *settings) as (url, _):
        stand = Stand(url, device, vocabulary, scale)
        try:
            yield stand
        finally:
            stand.close()
