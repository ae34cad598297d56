"""What `engine.batch_invariant` costs: the same cases with and without it, in turns.

    python benchmarks/batch_invariant.py [--shape smol135m] [--cases batch64 prefill256]

Both engines are loaded, each in a process of its own, in bfloat16 with random weights. Tokens per
second (all of them where one is asked for), medians over rounds after one warm-up.
"""

import argparse
import statistics
from contextlib import ExitStack
from pathlib import Path

from beside_vllm import contender, rates

from memd.bench.cases import CASES


def main() -> None:
    """Parse the command line, measure in turns, print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="smol135m")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=["batch64", "prefill256"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="30GB", help="of KV, for each")
    parser.add_argument("--logs", type=Path, default=Path())
    options = parser.parse_args()
    with ExitStack() as stack:
        fast, invariant = (
            stack.enter_context(
                contender(
                    options.logs / f"batch_invariant_{on}.log",
                    *("-m", "memd.cli", "bench", "offline", "--shape", options.shape, "--listen"),
                    *("--set", f"memory.limit={options.memory}"),
                    *("--set", f"engine.batch_invariant={on}"),
                )
            )
            for on in ("false", "true")
        )
        fast.read("ready")
        invariant.read("ready")
        print("| case | as it is | batch-invariant | share |\n|---|---|---|---|", flush=True)
        for name in options.cases:
            fast.run(name)
            invariant.run(name)
            pairs = [(fast.run(name), invariant.run(name)) for _ in range(options.rounds)]
            cells = rates(CASES[name], pairs)
            shares = [before / after for before, after in pairs]
            cells.append(f"{statistics.median(shares):.2f}")
            print(f"| {options.shape} {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
