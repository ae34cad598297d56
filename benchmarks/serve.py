"""Load for a server that speaks OpenAI's API, and how fast it answered.

    python benchmarks/serve.py [--url http://127.0.0.1:8733] [--mix chat|prefix|random]
        [--requests 200] [--rate 4] [--burst 1] [--prompt-tokens 256] [--output-tokens 64]
    python benchmarks/serve.py --overhead [--model smollm2-135m]

Open loop: requests arrive by a Poisson process whatever the server does, and latencies count from
the planned arrival, so that a server that stalls cannot hide it. `--overhead` compares 64 streams
over HTTP with the same work on an engine without a server (benchmarks/overhead.py): on two cores
some minutes, and each round is told on stderr as it ends.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any

from streams import Answer, Target
from workload import Session, Shape, body_of, sessions

PERCENTILES = (50, 95, 99)


class Load:
    """One run against one server.

    Args:
        target: The server.
        model: Which of its models.
        shape: What to send.
        extra: Fields added to every body.
    """

    def __init__(self, target: Target, model: str, shape: Shape, extra: dict[str, Any]) -> None:
        self._target = target
        self._model = model
        self._shape = shape
        self._extra = extra
        self._path = "/v1/chat/completions" if shape.mix == "chat" else "/v1/completions"
        self.answers: list[Answer] = []

    async def run(self) -> float:
        """Send everything; the seconds from the first arrival to the last answer."""
        started_at = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for session in sessions(self._shape):
                due_at = started_at + session.at_seconds
                await asyncio.sleep(max(0.0, due_at - time.monotonic()))
                group.create_task(self._converse(session, due_at))
        return time.monotonic() - started_at

    async def _converse(self, session: Session, due_at: float) -> None:
        history: list[dict[str, str]] = []
        for number, turn in enumerate(session.turns):
            if number:
                await asyncio.sleep(turn.after_seconds)
                due_at = time.monotonic()
            body = body_of(self._shape, self._model, history, turn) | self._extra
            answer = await self._target.stream(self._path, body, due_at)
            self.answers.append(answer)
            if answer.failure is not None:
                return  # there is nothing to go on from
            history += (
                {"role": "user", "content": turn.text},
                {"role": "assistant", "content": answer.text},
            )


def summary(answers: list[Answer], took_seconds: float) -> dict[str, Any]:
    """The run in numbers: seconds, tokens, shares. What no server told is None."""
    good = [answer for answer in answers if answer.failure is None]
    prompt = _told(answer.prompt_tokens for answer in good)
    cached = _told(answer.cached_tokens for answer in good)
    counted = [answer.completion_tokens for answer in good]
    output = sum(
        len(answer.token_times) if count is None else count
        for answer, count in zip(good, counted, strict=True)
    )
    gaps = [
        after - before
        for answer in good
        for before, after in zip(answer.token_times, answer.token_times[1:], strict=False)
    ]
    firsts = [answer.token_times[0] - answer.due_at for answer in good if answer.token_times]
    return {
        "requests": len(answers),
        "failures": dict(Counter(answer.failure for answer in answers if answer.failure)),
        "seconds": took_seconds,
        "requests_per_second": len(good) / took_seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_second": output / took_seconds,
        "cached_share": cached / prompt if prompt and cached is not None else None,
        "first_token_seconds": percentiles(firsts),
        "between_tokens_seconds": percentiles(gaps),
        "end_to_end_seconds": percentiles([answer.ended_at - answer.due_at for answer in good]),
        "latest_send_seconds": max((a.sent_at - a.due_at for a in answers), default=None),
    }


def _told(values: Any) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def percentiles(values: list[float]) -> dict[str, float | None]:
    """The nearest rank, by name; None without values."""
    ordered = sorted(values)
    return {
        f"p{each}": ordered[min(len(ordered) - 1, len(ordered) * each // 100)] if ordered else None
        for each in PERCENTILES
    }


def table(result: dict[str, Any]) -> str:
    """A summary for people; times in milliseconds."""
    lines = [f"{'milliseconds':<24}" + "".join(f"{f'p{each}':>10}" for each in PERCENTILES)]
    for name in ("first_token", "between_tokens", "end_to_end"):
        row = result[f"{name}_seconds"].values()
        cells = (f"{'-':>10}" if value is None else f"{value * 1e3:>10.1f}" for value in row)
        lines.append(f"{name.replace('_', ' '):<24}" + "".join(cells))
    failures = ", ".join(f"{count} {kind}" for kind, count in result["failures"].items()) or "none"
    cached = result["cached_share"]
    lines += [
        f"requests                {result['requests']} in {result['seconds']:.2f} s, "
        f"{result['requests_per_second']:.2f}/s",
        f"failures                {failures}",
        f"output tokens           {result['output_tokens']}, "
        f"{result['output_tokens_per_second']:.1f}/s",
        f"prompt tokens           {result['prompt_tokens'] or 'unknown'}, "
        f"cached {'unknown' if cached is None else f'{cached:.1%}'}",
    ]
    return "\n".join(lines)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the load that the command line describes."""
    target = Target(arguments.url, arguments.api_key, arguments.timeout)
    model = arguments.model or (await target.get("/v1/models"))["data"][0]["id"]
    shape = Shape(
        mix=arguments.mix,
        requests=arguments.requests,
        rate=arguments.rate,
        burst=arguments.burst,
        duration_seconds=arguments.duration,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        spread=arguments.spread,
        turns=arguments.turns,
        think_seconds=arguments.think,
        seed=arguments.seed,
    )
    extra = {"seed": arguments.seed, "temperature": arguments.temperature}
    if arguments.ignore_eos:
        extra["ignore_eos"] = True
    load = Load(target, model, shape, extra)
    return summary(load.answers, await load.run())


def parser() -> argparse.ArgumentParser:
    """All options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--url", default="http://127.0.0.1:8733")
    add("--api-key")
    add("--model", help="default: the first that the server lists")
    add("--mix", choices=["chat", "prefix", "random"], default="chat")
    add("--requests", type=int, default=200, help="in all, turns of chats counted")
    add("--rate", type=float, default=4.0, help="requests a second; inf: all at once")
    add("--burst", type=int, default=1, help="requests that arrive together")
    add("--duration", type=float, help="seconds after which nothing new arrives")
    add("--prompt-tokens", type=int, default=256, help="mean; in a chat: of a turn's new text")
    add("--output-tokens", type=int, default=64, help="mean")
    add("--spread", type=float, default=0.5, help="of lengths around their mean, 0 to 1")
    add("--turns", type=int, default=3, help="of a conversation")
    add("--think", type=float, default=1.0, help="mean seconds between turns")
    add("--temperature", type=float, default=0.0)
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    add("--timeout", type=float, default=600.0, help="seconds a request may take")
    add("--seed", type=int, default=1)
    add("--format", choices=["table", "json"], default="table")
    add("--overhead", action="store_true", help="the cost of HTTP and SSE instead")
    add("--streams", type=int, default=64, help="of --overhead")
    add("--rounds", type=int, default=3, help="of --overhead, after one that warms up")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="of --overhead")
    return options


def main() -> int:
    """1 when a request failed."""
    options = parser()
    arguments = options.parse_args()
    for name in ("requests", "rate", "burst", "prompt_tokens", "output_tokens", "turns"):
        if not getattr(arguments, name) > 0:
            options.error(f"--{name.replace('_', '-')} must be above 0")
    if not 0 <= arguments.spread <= 1:
        options.error(f"--spread must be from 0 to 1, not {arguments.spread:g}")
    if arguments.overhead:
        from overhead import compare, describe

        result = compare(
            arguments.model or "smollm2-135m",
            arguments.streams,
            arguments.rounds,
            arguments.prompt_tokens,
            arguments.output_tokens,
            arguments.set,
        )
        print(json.dumps(result, indent=1) if arguments.format == "json" else describe(result))
        return 0
    result = asyncio.run(measure(arguments))
    print(json.dumps(result, indent=1) if arguments.format == "json" else table(result))
    return bool(result["failures"])


if __name__ == "__main__":
    sys.exit(main())
