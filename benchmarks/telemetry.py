"""What watching costs: streams through a daemon that is watched, against one that is not.

    python benchmarks/telemetry.py [--model smollm2-135m] [--streams 16] [--rounds 10] [--every 15]

The watched one is scraped, keeps samples and evaluates alerts every so many seconds (15 is the
default of all three), and has an open page of the dashboard; the other one has none of it. Both
run the same prompts in turns; whoever is not measured is stopped by a signal, so that it takes no
time from the other.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from daemon_process import serving
from overhead import SETTINGS, over_http, work_of
from streams import Target

QUIET = ("history.sample_every=1h", "alerts.enabled=false")
BOTH = (*SETTINGS, "engine.hang_timeout=1h")
PAGE_SECONDS = 2.0  # between two looks of a page at its numbers


class Side:
    """A daemon that can be stopped and continued.

    Args:
        url: Its address.
        process: Its api process.
        every: Seconds between two scrapes; None: nobody watches it.
    """

    def __init__(self, url: str, process: "subprocess.Popen[str]", every: float | None) -> None:
        self.target = Target(url)
        status = asyncio.run(self.target.get("/admin/v1/status"))
        self.url = url
        self.model = status["model"]["name"]
        self.every = every
        self._pids = (process.pid, status["engine"]["pid"])

    def signal(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def cpu_seconds(self) -> float:
        """Time on the CPU that its processes have taken so far."""
        ticks = 0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # in user mode, in the kernel
        return ticks / os.sysconf("SC_CLK_TCK")

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run, with whoever watches it, until the end of the block."""
        self.signal(signal.SIGCONT)
        watchers = [] if self.every is None else _watchers(self.url, self.every)
        try:
            yield
        finally:
            for watcher in watchers:
                watcher.terminate()
                watcher.wait()
            self.signal(signal.SIGSTOP)


def _watchers(url: str, every: float) -> list["subprocess.Popen[bytes]"]:
    """One process that looks as an open page of the dashboard does and scrapes; it says when."""
    command = [sys.executable, __file__, "--watch", url, "--every", str(every)]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert watcher.stdout is not None
    watcher.stdout.readline()  # the first answers are there
    return [watcher]


def watch(url: str, every: float) -> None:
    """Look at everything until told to end."""
    from memd_dashboard.feed import Feed
    from memd_dashboard.ui.overview import TOPICS

    def scrape() -> None:
        while True:
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                answer.read()
            time.sleep(every)

    threading.Thread(target=scrape, daemon=True).start()
    feed = Feed(url, None)
    feed.snapshot(TOPICS)
    print("watching", flush=True)
    while True:
        time.sleep(PAGE_SECONDS)
        feed.snapshot(TOPICS)


def compare(
    model: str,
    streams: int,
    rounds: int,
    prompt_tokens: int,
    output_tokens: int,
    every: float,
    assignments: Sequence[str] = (),
) -> dict[str, Any]:
    """Run both sides in turns; who begins changes with each round.

    Args:
        model: What `model.path` takes.
        streams: At once.
        rounds: Of each side, after one that is not counted.
        prompt_tokens: Of each stream, about.
        output_tokens: Of each stream.
        every: Seconds between scrapes, samples and evaluations.
        assignments: `key=value` settings of both sides.

    Returns:
        Seconds of each round by side, and those that the daemon took of the CPU; `cost`, the median
        share by which being watched took longer, and the quartiles of that share.
    """
    times: dict[str, list[float]] = {"watched": [], "quiet": []}
    cpu_times: dict[str, list[float]] = {"watched": [], "quiet": []}
    generated = 0
    watched = (f"history.sample_every={every}s", f"alerts.evaluate_every={every}s")
    with ExitStack() as stack:
        sides = [
            _side(stack, model, (*assignments, *QUIET), None),
            _side(stack, model, (*assignments, *watched), every),
        ]
        for side in sides:
            side.signal(signal.SIGSTOP)
            stack.callback(side.signal, signal.SIGCONT)  # or it could not end
        for number in range(rounds + 1):
            work = work_of(streams, prompt_tokens, output_tokens, seed=number)
            for side in sides if number % 2 else reversed(sides):
                with side.awake():
                    began = side.cpu_seconds()
                    seconds, generated = asyncio.run(over_http(side.target, side.model, work))
                    cpu = side.cpu_seconds() - began
                name = "quiet" if side.every is None else "watched"
                print(
                    f"round {number}, {name}: {seconds:.3f} s, {cpu:.2f} s on the CPU",
                    file=sys.stderr,
                    flush=True,
                )
                if number:
                    times[name].append(seconds)
                    cpu_times[name].append(cpu)
    pairs = zip(times["watched"], times["quiet"], strict=True)
    shares = [ours / quiet - 1 for ours, quiet in pairs]
    low, cost, high = statistics.quantiles(shares, n=4)
    return {
        "streams": streams,
        "output_tokens": generated,
        "seconds": times,
        "cpu_seconds": cpu_times,
        "cost": cost,
        "quartiles": [low, high],
    }


def _side(stack: ExitStack, model: str, assignments: Sequence[str], every: float | None) -> Side:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    url, process = stack.enter_context(serving(directory, model, *BOTH, *assignments))
    return Side(url, process, every)


def describe(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{result['streams']} streams, {result['output_tokens']} tokens a round"]
    for side, seconds in result["seconds"].items():
        median = statistics.median(seconds)
        lines.append(
            f"{side:<8} median {median:.3f} s, {result['output_tokens'] / median:.0f} tokens/s   "
            + " ".join(f"{each:.3f}" for each in seconds)
        )
    for side, seconds in result["cpu_seconds"].items():
        lines.append(f"{side:<8} median {statistics.median(seconds):.2f} s on the CPU")
    low, high = result["quartiles"]
    cost = f"being watched costs {result['cost']:+.1%} (quartiles {low:+.1%} to {high:+.1%})"
    return "\n".join([*lines, cost])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10, help="at least 2")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument(
        "--set", action="append", default=[], dest="assignments", metavar="KEY=VALUE"
    )
    parser.add_argument("--every", type=float, default=15.0, help="seconds")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--watch", metavar="URL", help="only look, as a dashboard and a scraper do")
    options = parser.parse_args()
    if options.watch:
        watch(options.watch, options.every)
        return
    result = compare(
        options.model,
        options.streams,
        options.rounds,
        options.prompt_tokens,
        options.output_tokens,
        options.every,
        options.assignments,
    )
    print(json.dumps(result) if options.json else describe(result))


if __name__ == "__main__":
    main()
