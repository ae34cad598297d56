"""Microseconds per pool operation at pool sizes from 10^3 to 10^6 pages.

    python benchmarks/pool.py [--sizes 1000 10000 …] [--format json]

Each pool is filled with cached sequences first. Then sequences that were there before are matched,
admitted and released again (warm), new ones are admitted, published and released (cold: each evicts
what it needs), and running ones grow. Figures are medians over rounds, in microseconds a page
(match, admit, publish, release, evict) or a call (grow). The last columns time an 8,192-token
prompt as a whole.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator

from memd.pool.layout import KVLayout
from memd.pool.pool import Pool
from memd.pool.sequence import PoolSequence
from memd.pool.watermarks import Watermarks
from memd.types import BlockId, RequestId

PAGE_TOKENS = 16
PAGES_PER_BLOCK = 45  # a 135M model's 16-token pages in a block of 16 MiB
SEQUENCE_PAGES = 32
LONG_TOKENS = 8192
ROUNDS = 200
NAMESPACE = "bench"


class NoBacking:
    """Blocks without memory: only the bookkeeping is timed."""

    def commit(self, block: BlockId) -> None:
        pass

    def settle(self) -> None:
        pass

    def decommit(self, block: BlockId) -> None:
        pass


class Bench:
    """A full pool of one size and the tokens that are in it."""

    def __init__(self, pages: int) -> None:
        page_bytes = PAGE_TOKENS * 2
        layout = KVLayout(1, 1, 1, 1, PAGE_TOKENS, PAGES_PER_BLOCK * page_bytes)
        self.pool = Pool(layout, pages, NoBacking(), Watermarks(1.0, 0.99), time.perf_counter)
        self._random = random.Random(1)
        self._serial = 0
        self.known: list[array[int]] = []
        while self.pool.occupied_pages + SEQUENCE_PAGES <= pages:
            self.known.append(self.prompt(SEQUENCE_PAGES * PAGE_TOKENS))
            self.pool.release(self.admit(self.known[-1]), SEQUENCE_PAGES * PAGE_TOKENS)

    def prompt(self, num_tokens: int) -> "array[int]":
        return array("i", self._random.choices(range(50_000), k=num_tokens))

    def admit(self, tokens: "array[int]") -> PoolSequence:
        self._serial += 1
        match = self.pool.match(tokens, NAMESPACE)
        return self.pool.admit(RequestId(str(self._serial)), tokens, NAMESPACE, match)[0]

    def warm(self) -> Iterator[tuple[str, float]]:
        """A prompt that is cached: matched, admitted, released."""
        tokens = self._random.choice(self.known)
        if self.pool.match(tokens, NAMESPACE).num_tokens < len(tokens) - 1:  # evicted meanwhile
            self.pool.release(self.admit(tokens), len(tokens))
        match, spent = timed(lambda: self.pool.match(tokens, NAMESPACE))
        yield "match", spent / SEQUENCE_PAGES
        self._serial += 1
        (sequence, _), spent = timed(
            lambda: self.pool.admit(RequestId(str(self._serial)), tokens, NAMESPACE, match)
        )
        yield "admit", spent / SEQUENCE_PAGES
        _, spent = timed(lambda: self.pool.release(sequence, len(tokens) - 1))
        yield "release", spent / SEQUENCE_PAGES

    def cold(self) -> Iterator[tuple[str, float]]:
        """A prompt that is new to a full pool: pages evicted, taken, published."""
        _, spent = timed(lambda: self.pool.evict(SEQUENCE_PAGES + 1))
        yield "evict", spent / (SEQUENCE_PAGES + 1)
        tokens = self.prompt(SEQUENCE_PAGES * PAGE_TOKENS)
        sequence = self.admit(tokens)
        _, spent = timed(lambda: self.pool.publish(sequence, len(tokens)))
        yield "publish", spent / SEQUENCE_PAGES
        _, spent = timed(lambda: self.pool.grow(sequence, len(tokens) + 1))
        yield "grow", spent
        self.pool.release(sequence, len(tokens))

    def long(self) -> Iterator[tuple[str, float]]:
        """An 8k-token prompt as a whole, new and known."""
        tokens = self.prompt(LONG_TOKENS)
        for name in ("8k cold", "8k warm"):

            def serve() -> None:
                sequence = self.admit(tokens)
                self.pool.release(sequence, LONG_TOKENS)

            _, spent = timed(serve)
            yield name, spent


def timed(work: Callable[[], object]) -> tuple[object, float]:
    started_at = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - started_at) * 1e6


def measure(sizes: list[int]) -> dict[int, dict[str, float]]:
    """Median microseconds by operation for each pool size; the sizes take turns."""
    benches = {size: Bench(size) for size in sizes}
    gc.collect()
    gc.freeze()  # the collector's pauses belong to the benchmark's garbage, not to the pool
    samples: dict[int, dict[str, list[float]]] = {size: {} for size in sizes}
    for number in range(ROUNDS):
        for size, bench in benches.items():
            operations = [*bench.warm(), *bench.cold()]
            if number % 10 == 0 and size * PAGE_TOKENS > 2 * LONG_TOKENS:
                operations += bench.long()
            for name, spent in operations:
                samples[size].setdefault(name, []).append(spent)
    return {
        size: {name: statistics.median(values) for name, values in found.items()}
        for size, found in samples.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--format", choices=["table", "json"], default="table")
    arguments = parser.parse_args()
    rows = measure(arguments.sizes)
    if arguments.format == "json":
        json.dump(rows, sys.stdout, indent=1)
        return
    names = list(rows[arguments.sizes[-1]])
    print(f"{'pages':>9}" + "".join(f"{name:>10}" for name in names))
    for size, row in rows.items():
        print(f"{size:>9}" + "".join(f"{row.get(name, float('nan')):>10.2f}" for name in names))


if __name__ == "__main__":
    main()
