"""memd and vLLM on one GPU, in turns: the same shapes, prompts and limits.

    python benchmarks/beside_vllm.py --shape llama8b --vllm-path /path/of/vllm/packages

Both have the model loaded, each in a process of its own with its share of the memory, and neither
keeps KV outside the card; while one runs a case the other has nothing to do. Output tokens per
second (all tokens where one is asked for), medians over rounds after one warm-up, and the median of
the rounds' ratios.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from memd.bench.cases import CASES, Case

HERE = Path(__file__).parent


class Contender:
    """A process that runs cases when told to."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def read(self, kind: str) -> dict[str, float]:
        """Wait for a line of a kind. Raises RuntimeError when the process ends before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(f"@{kind} "):
                answer: dict[str, float] = json.loads(line.split(" ", 1)[1])
                return answer
        raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")

    def run(self, case: str) -> float:
        """Seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(case + "\n")
        self._process.stdin.flush()
        return self.read("done")["seconds"]


@contextmanager
def contender(log: Path, *arguments: str, path: str | None = None) -> Iterator[Contender]:
    """A contender's process; what it says about itself goes to a log."""
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = f"{HERE.parent}:{path}"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Contender(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # vLLM's engine is a process of its own


def rate(case: Case, seconds: float) -> float:
    """Output tokens per second, or all tokens where one output token is asked for."""
    tokens = case.output_tokens + (case.prompt_tokens if case.output_tokens == 1 else 0)
    return case.requests * tokens / seconds


def rates(case: Case, pairs: list[tuple[float, float]]) -> list[str]:
    """Both contenders' tokens per second as cells of a table, from their seconds in each round."""
    found = ([rate(case, pair[i]) for pair in pairs] for i in (0, 1))
    return [f"{statistics.median(each):,.0f} ({min(each):,.0f}-{max(each):,.0f})" for each in found]


def main() -> None:
    """Parse the command line, measure in turns, print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="llama8b")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memd-memory", default="45GB", help="of KV, for memd")
    parser.add_argument("--vllm-share", default="0.45", help="of the card, for vLLM")
    parser.add_argument("--vllm-path", help="PYTHONPATH of vLLM, where it is not installed")
    parser.add_argument("--logs", type=Path, default=Path())
    options = parser.parse_args()
    with ExitStack() as stack:
        peer = stack.enter_context(
            contender(
                options.logs / "vllm.log",
                *(str(HERE / "vllm_offline.py"), "--shape", options.shape),
                *("--memory-share", options.vllm_share),
                path=options.vllm_path,
            )
        )
        peer.read("ready")  # first: it measures what memory is free while it loads
        memd = stack.enter_context(
            contender(
                options.logs / "memd.log",
                *("-m", "memd.cli", "bench", "offline", "--shape", options.shape, "--listen"),
                *("--set", f"memory.limit={options.memd_memory}"),
                *("--set", "memory.host.limit=0"),
            )
        )
        memd.read("ready")
        print("| case | memd | vLLM | ratio |\n|---|---|---|---|", flush=True)
        for name in options.cases:
            memd.run(name)
            peer.run(name)
            pairs = [(memd.run(name), peer.run(name)) for _ in range(options.rounds)]
            cells = rates(CASES[name], pairs)
            ratios = [theirs / ours for ours, theirs in pairs]
            cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})")
            print(f"| {options.shape} {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
