"""Products of many rows on a CPU: by MKL, by MKL with results by columns, by oneDNN; in turns.

    PYTHONPATH=kernels python benchmarks/kernels/cpu_products.py [--rows 17 64 512] [--rounds 9]

Milliseconds for the matrices of one layer, float32, medians over rounds. Each product reads another
copy of its matrix than the one before.
"""

import argparse
import os
import statistics
import time
from functools import partial

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the daemon starts its engine

import torch
import torch.nn.functional as F
from memd_kernels import cpu
from torch import Tensor

SHAPES = {  # [columns of the result, of x]
    "135M": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
    "1B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
}
COPIED_NUMBERS = 1 << 24  # more than a cache holds


def measure(count: int, size: int, rows: int, rounds: int) -> dict[str, float]:
    """Seconds of a product by form."""
    copies = max(2, min(10, COPIED_NUMBERS // (count * size)))
    weights, x = [torch.randn(count, size) for _ in range(copies)], torch.randn(rows, size)

    def by_columns(weight: Tensor) -> Tensor:
        return torch.mm(weight, x.t())

    forms = {
        "MKL": partial(F.linear, x),
        "by columns": by_columns,
        "oneDNN": partial(cpu.few_row_linear, x),
    }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            started = time.perf_counter()
            for weight in weights:
                form(weight)
            seconds[name].append((time.perf_counter() - started) / copies)
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[17, 32, 64, 128, 256, 512])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, shapes in SHAPES.items():
        for rows in options.rows:
            found = [measure(*shape, rows, options.rounds) for shape in shapes]
            told = ", ".join(
                f"{form} {1e3 * sum(each[form] for each in found):.2f}" for form in found[0]
            )
            print(f"{name}, {rows} rows: {told}")


if __name__ == "__main__":
    main()
