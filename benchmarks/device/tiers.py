"""Host tier, moving pages and giving memory back on a GPU, with the engine in this process.

    PYTHONPATH=$PWD:$PWD/kernels python benchmarks/device/tiers.py [--shape llama8b] [--parts ...]

Random weights in bfloat16. `restore`: first token of a prompt pushed to the host, beside
computing it anew. `prefetch`: a queue whose prompts are on the host; which pages were there when
a request's turn came. `defrag`: steps of a running batch in which pages move, beside those in which
none does. `memory`: what the card shows as used before, under and after a load. Prints one JSON
object a part.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from memd.bench.shapes import SHAPES, random_tensors
from memd.config import dump
from memd.config_sources import load
from memd.engine.build import assemble_engine
from memd.engine.messages import PoolCommand, SamplingParams, Start, StepReport, Submit
from memd.engine.port import InlinePort
from memd.engine.request import Request
from memd.models.config import ModelConfig
from memd.models.decoder import Decoder
from memd.pool.audit import check
from memd.pool.sequence import PrefixMatch

DEVICE = torch.device("cuda", 0)
LINK_CHUNK_BYTES = 16 * 2**20
SEQUENCES_OF_QUEUE = 4


class Bench:
    """An engine over one decoder, and its requests."""

    def __init__(self, decoder: Decoder, config: ModelConfig, *settings: str) -> None:
        self._port = InlinePort()
        self._rng = random.Random(1)
        self._serial = 0
        self._vocabulary = config.vocab_size
        tree = load(assignments=list(settings), environment={})
        start = Start(dump(tree), 1, self._vocabulary, [])
        self.engine, _ = assemble_engine(
            *(self._port, start, tree, config, decoder.forward, DEVICE, torch.bfloat16, "tiers"),
        )
        self.pool = self.engine.pool
        self.restored_tokens = 0
        self.open = 0

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(10, self._vocabulary) for _ in range(tokens)]

    def submit(self, prompt: list[int], output_tokens: int) -> str:
        self._serial += 1
        sampling = SamplingParams(0, output_tokens, temperature=0.0, ignore_eos=True)
        self._port.post(Submit(str(self._serial), prompt, sampling))
        self.open += 1
        return str(self._serial)

    def step(self) -> None:
        self.engine.step()
        for message in self._port.take():
            for output in message.outputs if isinstance(message, StepReport) else ():
                self.restored_tokens += sum((output.restored_tokens or {}).values())
                self.open -= output.finish_reason is not None
                if output.error:
                    raise RuntimeError(output.error)

    def first_token(self, prompt: list[int]) -> float:
        """Seconds from sending a prompt to its first token."""
        started_at = time.perf_counter()
        self.submit(prompt, 1)
        while self.open:
            self.step()
        return time.perf_counter() - started_at

    def drain(self) -> None:
        while self.open or self.engine.busy or self.pool.residency.moves:
            self.step()

    def push_down(self) -> None:
        """Have all cached pages go to the host."""
        while self.pool.pages.cached:
            self.pool.evict(self.pool.pages.cached)
            self.drain()

    def command(self, action: Any) -> None:
        self._port.post(PoolCommand(1, action))

    def end(self) -> None:
        self.drain()
        found = check(self.pool)
        if found:
            raise RuntimeError(f"audit: {found}")


def link_rate() -> float:
    """Bytes a second from pinned host memory to the device, by copies of 16 MiB."""
    count = 64
    host = torch.empty(count, LINK_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=DEVICE)
    rates = []
    for _ in range(4):
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        for index in range(count):
            target[index].copy_(host[index], non_blocking=True)
        torch.cuda.synchronize()
        rates.append(host.numel() / (time.perf_counter() - started_at))
    return statistics.median(rates[1:])


def restore(bench: Bench, tokens: int = 8128, rounds: int = 5) -> dict[str, Any]:
    bench.first_token(bench.prompt(tokens))
    cold, restored, hit = [], [], []
    for _ in range(rounds):
        prompt = bench.prompt(tokens)
        cold.append(bench.first_token(prompt))
        bench.drain()
        bench.push_down()
        before = bench.restored_tokens
        restored.append(bench.first_token(prompt))
        came = bench.restored_tokens - before
        hit.append(bench.first_token(prompt))
    bench.end()
    layout = bench.pool.layout
    moved = came // layout.page_tokens * layout.page_bytes
    ratios = [a / b for a, b in zip(cold, restored, strict=True)]
    link = link_rate()
    rate = moved / (statistics.median(restored) - statistics.median(hit))
    return {
        "prompt_tokens": tokens,
        "restored_tokens": came,
        "cold_seconds": statistics.median(cold),
        "restored_seconds": statistics.median(restored),
        "on_device_seconds": statistics.median(hit),
        "cold_to_restored": [round(statistics.median(ratios), 2), min(ratios), max(ratios)],
        "restored_bytes_per_second": rate,
        "link_bytes_per_second": link,
        "of_the_link": rate / link,
    }


def prefetch(bench: Bench, requests: int = 20, tokens: int = 4096) -> dict[str, Any]:
    prompts = [bench.prompt(tokens) for _ in range(requests)]
    for prompt in prompts:
        bench.first_token(prompt)
        bench.drain()
    bench.push_down()
    late: dict[str, int] = {}
    prefetcher = bench.engine.scheduler._prefetcher
    wait = prefetcher.bring_up

    def bring_up(request: Request, match: PrefixMatch) -> bool:
        late.setdefault(request.id, len(match.missing))
        return wait(request, match)

    prefetcher.bring_up = bring_up  # type: ignore[method-assign]
    before = bench.restored_tokens
    names = [bench.submit(prompt, 64) for prompt in prompts]
    started_at = time.perf_counter()
    bench.drain()
    seconds = time.perf_counter() - started_at
    bench.end()
    page_tokens = bench.pool.layout.page_tokens
    restored = (bench.restored_tokens - before) // page_tokens
    # Those that begin at once: nothing could be brought up before the queue was there.
    first = sum(late.pop(name, 0) for name in names[:SEQUENCES_OF_QUEUE])
    late_pages = sum(late.values())
    return {
        "requests": requests,
        "restored_pages": restored,
        "of_those_that_begin_at_once": first,
        "late_pages": late_pages,
        "in_time": 1 - late_pages / max(1, restored - first),
        "prefetched": bench.pool.counters.prefetched,
        "seconds": seconds,
    }


def defrag(bench: Bench) -> dict[str, Any]:
    defragmenter = bench.engine.elasticity.elastic.defragmenter
    for index in range(64):  # of which every second ends soon and leaves holes
        bench.submit(bench.prompt(400 + 37 * index), 2400 if index % 2 else 2)
    times: dict[bool, list[float]] = {False: [], True: []}
    most = 0
    while bench.open > 32:
        bench.step()
    for _ in range(40):
        bench.step()
    for turn in range(2000):
        if turn % 100 == 0:
            for _ in range(16):  # of what these leave, a part goes at random
                bench.submit(bench.prompt(1500), 1)
            while bench.open > 32:
                bench.step()
            cold = bench.pool.lru.in_order()
            for page in random.Random(turn).sample(cold, len(cold) // 3):
                node = bench.pool.pages.node[page]
                if node is not None and page in bench.pool.lru:
                    bench.pool.drop_prefix(node)
            bench.command("defrag")
        before = defragmenter.moved_pages
        started_at = time.perf_counter()
        bench.step()
        seconds = time.perf_counter() - started_at
        moved = defragmenter.moved_pages - before
        most = max(most, moved)
        times[moved > 0].append(seconds)
    bench.end()
    still, moving = (sorted(times[kind]) for kind in (False, True))
    return {
        "steps": [len(still), len(moving)],
        "moved_pages": defragmenter.moved_pages,
        "most_pages_in_a_step": most,
        "median_seconds": statistics.median(still),
        "median_seconds_moving": statistics.median(moving) if moving else None,
        "longest_tenth_still": still[-len(still) // 10],
        "longest_hundredth_still": still[-len(still) // 100],
        "longest_tenth_moving": moving[-len(moving) // 10] if moving else None,
        "most_seconds_still": still[-1],
        "most_seconds_moving": moving[-1] if moving else None,
    }


def memory(bench: Bench) -> dict[str, Any]:
    def used() -> int:
        free, total = torch.cuda.mem_get_info(DEVICE)
        return total - free

    bench.drain()
    bench.command("flush")
    bench.step()
    bench.first_token(bench.prompt(512))
    before = used()
    for _ in range(48):
        bench.submit(bench.prompt(4096), 64)
    peak = before
    while bench.open:
        bench.step()
        peak = max(peak, used())
    bench.drain()
    cached = used()
    bench.pool.evict(bench.pool.pages.cached * 9 // 10)
    bench.command("defrag")
    until = time.monotonic() + 6
    while time.monotonic() < until:
        bench.engine.step(0.01)
    blocks = bench.pool.blocks
    live = -(-blocks.used_pages // blocks.pages_per_block)
    bench.end()
    return {
        "used_bytes_before": before,
        "under_load": peak,
        "with_what_is_cached": cached,
        "after": used(),
        "committed_blocks": blocks.committed_blocks,
        "live_blocks": live,
        "committed_to_live": blocks.committed_blocks / max(1, live),
    }


QUEUE = (
    "memory.limit=60000 tokens",
    "memory.host.limit=12GB",
    f"engine.max_sequences={SEQUENCES_OF_QUEUE}",
)
BATCH = (
    "memory.limit=300000 tokens",
    "memory.host.limit=0",
    "engine.max_sequences=64",
    "memory.elastic.idle=1s",
)
PARTS: dict[str, tuple[Callable[[Bench], dict[str, Any]], tuple[str, ...]]] = {
    "restore": (restore, QUEUE),
    "prefetch": (prefetch, QUEUE),
    "defrag": (defrag, BATCH),
    "memory": (memory, BATCH),
}


def main() -> None:
    """Parse the command line, run the parts, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="llama8b", choices=tuple(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer than the shape's: starts sooner")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=tuple(PARTS))
    options = parser.parse_args()
    config = SHAPES[options.shape]
    layers = options.layers or config.num_layers
    config = replace(config, num_layers=layers, windows=config.windows[:layers])
    decoder = Decoder(config, random_tensors(config, torch.bfloat16, DEVICE), DEVICE)

    benches: dict[tuple[str, ...], Bench] = {}
    for name in options.parts:
        run, settings = PARTS[name]
        try:
            if settings not in benches:
                benches.clear()
                torch.cuda.empty_cache()
                benches[settings] = Bench(decoder, config, *settings)
            found = run(benches[settings])
        except Exception as error:  # the other parts still tell something
            found = {"error": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps({name: found}))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
