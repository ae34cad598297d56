"""Launches of `few_row_linear` for common models, tried for a limited time.

    python benchmarks/kernels/tune_linear.py --seconds 120 --output table.json

As `memd_kernels.tune`, but all kernels are first compiled at once, on all processors.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from memd_kernels import tune
from memd_kernels.launch import LaunchConfig, format_table
from memd_kernels.triton.linear import launch_linear


def say(line: str) -> None:
    print(line, flush=True)


def warm(launches: list[tuple[LaunchConfig, int]]) -> None:
    """Compile in a process of its own; the compiler's cache on disk has it then."""
    for config, rows in launches:
        x = torch.zeros(rows, 1024, device="cuda", dtype=torch.bfloat16)
        weight = torch.zeros(256, 1024, device="cuda", dtype=torch.bfloat16)
        try:
            launch_linear(x, weight, None, config)
        except Exception as error:
            say(f"{config}: {type(error).__name__}")


def distinct_launches() -> list[tuple[LaunchConfig, int]]:
    """One for each kernel that the weights of the large model need."""
    found = {}
    for (size, depth), rows in itertools.product(tune.LINEAR_SHAPES[:5], tune.LINEAR_ROWS):
        for config in tune.linear_candidates(size, depth):
            splits = 2 if config.splits > 1 else 1
            key = (config.block_n, config.block_k, config.num_stages, splits, rows)
            found[key] = LaunchConfig(4, key[2], 0, key[0], key[1], splits), rows
    return list(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    launches, workers = distinct_launches(), max(1, (os.cpu_count() or 1) - 2)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(warm, [launches[start::workers] for start in range(workers)]))
    say(f"{len(launches)} kernels compiled, {end - time.monotonic():.0f} s left")

    def cases() -> Iterator[tune.TuneCase]:
        for case in tune.linear_cases(tune.LINEAR_SHAPES):
            if time.monotonic() > end:
                say("out of time: the shapes that follow are left out")
                return
            yield case

    table = tune.tune(cases(), torch.cuda.get_device_name(), say)
    options.output.write_text(format_table(table))
    return 0 if table.entries else 1


if __name__ == "__main__":
    sys.exit(main())
