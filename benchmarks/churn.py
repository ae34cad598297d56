"""What an hour of churn does to the pool's memory, and what moving pages costs.

    python benchmarks/churn.py [--seconds 3600] [--format json]
    python benchmarks/churn.py --engine [--format json]

The first simulates arrivals on a virtual clock: the real pool, its defragmentation and its growing
and shrinking, over memory that only counts. Prompts and outputs together have 10 to 8,000 tokens,
lengths of all sizes being equally likely; the load rises and falls, and ends. The second runs the
demo model on this CPU over real memory: what the process has before, under and after a load, and
how long steps take while pages move and while they do not.
"""

import argparse
import json
import math
import os
import random
import statistics
import time
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memd.automatic import defrag_pages_per_step
from memd.config import dump
from memd.config_sources import load
from memd.engine.build import load_engine
from memd.engine.messages import PoolCommand, SamplingParams, Start, Submit
from memd.engine.port import InlinePort
from memd.errors import PoolExhausted
from memd.pool.elastic import Elastic
from memd.pool.layout import KVLayout
from memd.pool.limit import PoolLimit
from memd.pool.pool import Pool
from memd.pool.pressure import Pressure
from memd.pool.sequence import PoolSequence
from memd.pool.watermarks import Watermarks
from memd.types import BlockId, RequestId

STEP_SECONDS = 0.05
STEP_TOKENS = 2048  # prompt tokens computed in a step
MAX_SEQUENCES = 64
LOAD_PROMPTS = 20
ROUNDS = 3
SHAPES = (  # name, layout, bytes of the limit
    ("8B, 64-token pages", KVLayout(32, 8, 128, 2, 64, 16 << 20), 40 * 10**9),
    ("135M, 64-token pages", KVLayout(30, 3, 64, 2, 64, 15 << 20), 6 * 10**9),
    ("135M, 16-token pages, float32", KVLayout(30, 3, 64, 4, 16, 15482880), 6 * 10**9),
)


class Counting:
    """Blocks without memory."""

    def commit(self, block: BlockId) -> None:
        pass

    def settle(self) -> None:
        pass

    def decommit(self, block: BlockId) -> None:
        pass


@dataclass(eq=False)
class Running:
    """A sequence under way: computed so far, and its length at the end."""

    sequence: PoolSequence
    computed: int
    end: int


@dataclass
class Report:
    """Shares of one; blocks.

    The shares are of the time with load. `strict`: of the room of blocks that hold something, all
    that holds nothing. `before_the_last_run`: half of what was cached had been evicted at once.
    """

    layout: str
    requests: int = 0
    steps: int = 0
    blocks: int = 0
    most_fragmentation: float = 0.0
    most_strict_fragmentation: float = 0.0
    mean_strict_fragmentation: float = 0.0
    before_the_last_run: float = 0.0
    most_after_a_run: float = 0.0
    runs: int = 0
    moved_pages: int = 0
    most_moved_in_a_step: int = 0
    peak_committed_blocks: int = 0
    committed_blocks_after: int = 0
    live_blocks_after: int = 0
    committed_to_live_after: float = 0.0


class Churn:
    """The pool under arrivals, step by step."""

    def __init__(self, name: str, layout: KVLayout, limit_bytes: int, seed: int) -> None:
        self.time = 0.0
        pages = limit_bytes // layout.block_bytes * layout.pages_per_block
        self.pool = Pool(layout, pages, Counting(), Watermarks(0.9, 0.7), lambda: self.time)
        limit = PoolLimit(self.pool, pages)
        pressure = Pressure(lambda: 10**12, layout.block_bytes, lambda: self.time)
        self.elastic = Elastic(self.pool, limit, pressure, lambda: self.time)
        self.elastic.idle_seconds = 60.0
        self.elastic.defragmenter.every_requests = 100
        self.elastic.defragmenter.max_fragmentation = 0.15
        self.elastic.defragmenter.pages_per_step = defrag_pages_per_step("cuda", layout.page_bytes)
        self.report = Report(name, blocks=pages // layout.pages_per_block)
        self.running: list[Running] = []
        self._random = random.Random(seed)
        self._shared = [self._tokens(1000) for _ in range(8)]
        self._waiting: list[tuple[array[int], int]] = []
        self._strict = 0.0
        self._ended = 0  # runs

    def run(self, seconds: float) -> Report:
        """Arrivals for so long, then only what is under way and ten idle minutes."""
        while self.time < seconds:
            rate = 1.2 + math.sin(self.time / 300)  # a second; up and down within half an hour
            while self._random.random() < rate * STEP_SECONDS:
                self._waiting.append(self._request())
                rate -= 1
            self.step()
        while self.running or self._waiting:
            self.step()
        self.report.mean_strict_fragmentation = self._strict / self.report.steps
        cold = self.pool.lru.in_order()
        for page in self._random.sample(cold, len(cold) // 2):
            node = self.pool.pages.node[page]
            if node is not None and page in self.pool.lru:
                self.pool.drop_prefix(node)
        self.report.before_the_last_run = self.pool.blocks.fragmentation
        end = self.time + 600
        while self.time < end:
            self.step()
        return self._finish()

    def step(self) -> None:
        """Start, move, compute and end sequences, as the engine does."""
        pool, elastic = self.pool, self.elastic
        self.time += STEP_SECONDS
        elastic.begin_step(lambda: 0)
        self._start()
        pool.reclaim(max(64, pool.capacity_pages // 64))
        moves = elastic.plan_moves(idle=not self.running)
        if moves:
            pool.relocate(moves)
            elastic.defragmenter.moved(moves, 0.0)
        self._note_runs()
        elastic.resize(self.time if self.running else None, 0)
        self._compute()
        if self.running:
            self._look(len(moves))

    def _request(self) -> tuple["array[int]", int]:
        """A prompt, a third of them behind one of eight shared ones, and the length at the end."""
        total = int(math.exp(self._random.uniform(math.log(10), math.log(8000))))
        prompt = self._tokens(max(1, int(total * self._random.uniform(0.2, 0.95))))
        if self._random.random() < 1 / 3 and total > 1200:
            prompt = self._random.choice(self._shared) + prompt[: len(prompt) // 2]
        return prompt, max(total, len(prompt) + 1)

    def _tokens(self, count: int) -> "array[int]":
        return array("i", self._random.choices(range(50_000), k=count))

    def _start(self) -> None:
        while self._waiting and len(self.running) < MAX_SEQUENCES:
            tokens, end = self._waiting[0]
            self.report.requests += 1
            name = RequestId(str(self.report.steps * 1000 + len(self.running)))
            try:
                found = self.pool.match(tokens, "")
                sequence, cached = self.pool.admit(name, tokens, "", found, 8)
            except PoolExhausted:
                self.report.requests -= 1
                return
            self.pool.copied(sequence)
            self._waiting.pop(0)
            self.running.append(Running(sequence, cached, end))

    def _compute(self) -> None:
        budget = STEP_TOKENS
        for each in list(self.running):
            if each not in self.running:
                continue  # it gave way to one before it
            tokens = each.sequence.tokens
            if each.computed < len(tokens):
                count = min(budget, len(tokens) - each.computed)
                each.computed, budget = each.computed + count, budget - count
            else:
                tokens.append(1 + self.report.requests)
                if not self._grow(each):
                    tokens.pop()
                    continue
                each.computed += 1
            self.pool.publish(each.sequence, each.computed)
            if each.computed >= each.end:
                self.pool.release(each.sequence, each.computed)
                self.running.remove(each)
                self.elastic.defragmenter.request_finished()

    def _grow(self, each: Running) -> bool:
        """Room for one token more; the last to start gives way, and starts again later."""
        while True:
            try:
                self.pool.grow(each.sequence, len(each.sequence.tokens))
            except PoolExhausted:
                last = self.running[-1]
                if last is each:
                    return False
                self.running.remove(last)
                self.pool.release(last.sequence, last.computed)
                self._waiting.insert(0, (last.sequence.tokens, last.end))
                self.report.requests -= 1
            else:
                return True

    def _look(self, moved: int) -> None:
        blocks, report = self.pool.blocks, self.report
        room = blocks.used_blocks * blocks.pages_per_block
        strict = 1 - blocks.used_pages / room if room else 0.0
        report.steps += 1
        self._strict += strict
        report.most_moved_in_a_step = max(report.most_moved_in_a_step, moved)
        report.most_fragmentation = max(report.most_fragmentation, blocks.fragmentation)
        if blocks.used_blocks >= 20:  # below, one block partly used is much
            report.most_strict_fragmentation = max(report.most_strict_fragmentation, strict)
        report.peak_committed_blocks = max(report.peak_committed_blocks, blocks.committed_blocks)

    def _note_runs(self) -> None:
        ended = sum(self.elastic.defragmenter.runs.values())
        if ended > self._ended:
            after = self.pool.blocks.fragmentation
            self._ended, self.report.most_after_a_run = (
                ended,
                max(after, self.report.most_after_a_run),
            )

    def _finish(self) -> Report:
        report, blocks = self.report, self.pool.blocks
        report.runs, report.moved_pages = self._ended, self.elastic.defragmenter.moved_pages
        report.committed_blocks_after = blocks.committed_blocks
        report.live_blocks_after = -(-blocks.used_pages // blocks.pages_per_block)
        report.committed_to_live_after = blocks.committed_blocks / max(1, report.live_blocks_after)
        return report


def simulate(seconds: float) -> list[dict[str, Any]]:
    """A row for each shape."""
    return [asdict(Churn(*shape, seed=1).run(seconds)) for shape in SHAPES]


def resident_bytes() -> int:
    """Memory of this process that is its own."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Demo:
    """The demo model in an inline engine on this CPU."""

    def __init__(self) -> None:
        settings = load(
            assignments=[
                *("model.path=smollm2-135m", "memory.limit=3GB", "engine.threads=1"),
                *("memory.elastic.idle=2s", "memory.defrag.every_requests=0"),
                *("memory.defrag.max_fragmentation=100%", "engine.device=cpu"),
            ],
            environment={},
        )
        self.port = InlinePort()
        self.engine, _ = load_engine(self.port, Start(dump(settings), 1, 49152, [2]))
        self.seconds: list[float] = []  # of steps
        self._serial = 0

    def submit(self, tokens: int, output: int, seed: int) -> None:
        """Queue a request with a random prompt."""
        self._serial += 1
        prompt = random.Random(seed).choices(range(1000, 40_000), k=tokens)
        sampling = SamplingParams(seed=1, max_tokens=output, temperature=0.0, ignore_eos=True)
        self.port.post(Submit(f"r{self._serial}", prompt, sampling))

    def step(self) -> float:
        """One step; returns how long it took."""
        started_at = time.perf_counter()
        self.engine.step()
        self.port.take()
        return time.perf_counter() - started_at

    def finish(self) -> None:
        """Take what was submitted, and go on until nothing is open."""
        self.step()
        while self.engine.scheduler.requests:
            self.step()

    def scatter(self, seed: int) -> None:
        """Forget half of what is cached, here and there."""
        pool, chance = self.engine.pool, random.Random(seed)
        for page in pool.lru.in_order():
            node = pool.pages.node[page]
            if node is not None and node.is_leaf and page in pool.lru and chance.random() < 0.5:
                pool.drop_prefix(node)


def on_this_cpu() -> dict[str, Any]:
    """Memory before, under and after a load; steps with and without moves of pages."""
    demo = Demo()
    moved = demo.engine.elasticity.elastic.defragmenter
    before = resident_bytes()
    for index in range(LOAD_PROMPTS):
        demo.submit(100 + 40 * (index % 5), 4, seed=index)
    demo.finish()
    under = resident_bytes()
    quiet: list[float] = []
    moving: list[float] = []
    for turn in range(ROUNDS):
        for index in range(4):  # streams that decode while pages move
            demo.submit(16, 60, seed=1000 + 10 * turn + index)
        for _ in range(8):  # their prompts
            demo.step()
        demo.scatter(turn)
        demo.port.post(PoolCommand(turn, "defrag"))
        while demo.engine.scheduler.requests:
            pages = moved.moved_pages
            seconds = demo.step()
            (moving if moved.moved_pages > pages else quiet).append(seconds)
        for index in range(LOAD_PROMPTS // 4):
            demo.submit(100 + 40 * (index % 5), 2, seed=2000 + 20 * turn + index)
        demo.finish()
    pool = demo.engine.pool
    pool.evict(pool.pages.cached)
    idle_until = time.monotonic() + 4
    while time.monotonic() < idle_until:
        demo.step()
        time.sleep(0.1)
    return {
        "resident_mb_before": before >> 20,
        "resident_mb_under_load": under >> 20,
        "resident_mb_after": resident_bytes() >> 20,
        "committed_blocks_after": pool.blocks.committed_blocks,
        "moved_pages": moved.moved_pages,
        "steps": len(quiet),
        "steps_with_moves": len(moving),
        "step_ms_median": round(statistics.median(quiet) * 1e3, 2),
        "step_ms_median_with_moves": round(statistics.median(moving) * 1e3, 2),
        "moves_ms_a_step": round(moved.step_seconds.total / max(1, len(moving)) * 1e3, 3),
    }


def main() -> None:
    """Run what is asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0, help="of arrivals")
    parser.add_argument("--engine", action="store_true", help="on this CPU, over real memory")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    rows = [on_this_cpu()] if arguments.engine else simulate(arguments.seconds)
    if arguments.format == "json":
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        for name, value in row.items():
            print(
                f"{name:>28}  {value:.4f}" if isinstance(value, float) else f"{name:>28}  {value}"
            )
        print()


if __name__ == "__main__":
    main()
