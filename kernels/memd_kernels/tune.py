"""Measures launches on the card at hand and writes the fastest as a launch table.

`python -m memd_kernels.tune --output table.json` tries decode attention over packed pages, and the
few-row products of common models, or those that `--linear NxK` names. A case is timed as a replayed
CUDA graph over inputs larger than the cache of the card, each candidate in turn, and the best ones
again.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from memd_kernels.launch import Entry, LaunchConfig, Table, format_table

# [N, K] of the projections of Llama-3.1-8B and SmolLM2-135M.
LINEAR_SHAPES = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096),
    (960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576),
)  # fmt: skip
LINEAR_ROWS = (16, 32, 64)
ROTATED_BYTES = 256 << 20  # several times the level 2 cache
_FINALISTS = 3


@dataclass(frozen=True)
class TuneCase:
    """A kernel at one shape.

    `run` makes `calls` calls with a launch, each on inputs of its own; it may raise for launches
    that the card cannot make.
    """

    entry: Entry  # its launch is not looked at
    candidates: tuple[LaunchConfig, ...]
    run: Callable[[LaunchConfig], None]
    calls: int


def graph_microseconds(run: Callable[[], None], replays: int = 15) -> float:
    """Median time of a replay of a CUDA graph of what `run` launches, after two that warm up."""
    run()  # compiles, and makes what is made once
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for replay in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 2:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def tune(
    cases: Iterable[TuneCase],
    measured_on: str,
    report: Callable[[str], None] = lambda line: None,
    measure: Callable[[Callable[[], None]], float] = graph_microseconds,
) -> Table:
    """The fastest candidate of each case; a case that none can run is left out."""
    entries = []
    for case in cases:
        times: list[tuple[float, LaunchConfig]] = []
        for candidate in case.candidates:
            try:
                times.append((measure(lambda: case.run(candidate)) / case.calls, candidate))  # noqa: B023
            except Exception as error:  # too much shared memory, say: as many kinds as compilers
                report(f"{case.entry.kernel} {candidate}: {type(error).__name__}")
        times.sort(key=lambda timed: timed[0])
        # The best of many is partly luck: the first few are timed again.
        again = [
            (max(time, measure(lambda: case.run(candidate)) / case.calls), candidate)  # noqa: B023
            for time, candidate in times[:_FINALISTS]
        ]
        if not again:
            continue
        time, best = min(again, key=lambda timed: timed[0])
        entry = case.entry
        report(f"{entry.kernel} {entry.format} {dict(entry.shape)}: {time:.2f} us, {best}")
        entries.append(Entry(entry.kernel, best, entry.format, entry.head_dim, entry.shape))
    return Table(tuple(entries), measured_on)


def linear_cases(
    shapes: Iterable[tuple[int, int]],
    rows: Iterable[int] = LINEAR_ROWS,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[TuneCase]:
    """`few_row_linear` of [N, K] weights; among the candidates is the vendor's library."""
    from memd_kernels.triton.linear import launch_linear

    device = torch.device("cuda", torch.cuda.current_device())
    for size, depth in shapes:
        copies = max(2, ROTATED_BYTES // (size * depth * dtype.itemsize) + 1)
        weights = torch.randn(copies, size, depth, device=device, dtype=dtype)
        for count in rows:
            x = torch.randn(count, depth, device=device, dtype=dtype)

            def run(found: LaunchConfig, x: Tensor = x, weights: Tensor = weights) -> None:
                for weight in weights:
                    if found.variant:
                        F.linear(x, weight)
                    else:
                        launch_linear(x, weight, None, found)

            shape = (("depth", depth), ("rows", count), ("size", size))
            entry = Entry("few_row_linear", LaunchConfig(), "half", None, shape)
            candidates = (LaunchConfig(variant="library"), *linear_candidates(size, depth))
            yield TuneCase(entry, candidates, run, copies)


def linear_candidates(size: int, depth: int) -> Iterator[LaunchConfig]:
    """Launches of `few_row_linear` worth trying: some hundreds of programs, deep stages."""
    for block_n, block_k, stages, splits in product(
        (32, 64, 128), (64, 128, 256), (3, 4, 6), (1, 2, 3, 4, 6, 8, 12, 16)
    ):
        programs = -(-size // block_n) * splits
        stage_bytes = 2 * block_k * (block_n + 16)
        steps = -(-depth // block_k)
        if splits > steps or stages * stage_bytes > 200 << 10 or stages > steps + 1:
            continue
        if (splits > 1 and programs > 600) or (programs < 100 and splits < min(steps, 16)):
            continue
        yield LaunchConfig(
            num_warps=4, num_stages=stages, block_n=block_n, block_k=block_k, splits=splits
        )


def main(arguments: list[str] | None = None) -> int:
    """Tune and write a table; 2 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="memd_kernels.tune", description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--linear", nargs="+", metavar="NxK", help="weights; default: common ones")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device to measure on\n")
        return 2
    shapes: tuple[tuple[int, int], ...] = LINEAR_SHAPES
    if options.linear:
        pairs = (text.split("x") for text in options.linear)
        shapes = tuple((int(size), int(depth)) for size, depth in pairs)

    def report(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    from memd_kernels.tune_packed import packed_cases

    device = torch.device("cuda", torch.cuda.current_device())
    cases = chain(linear_cases(shapes), packed_cases(device))
    table = tune(cases, torch.cuda.get_device_name(), report)
    options.output.write_text(format_table(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
